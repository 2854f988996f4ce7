"""What can go wrong, each with the sentence that says how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.http import HttpResponse


class IdempotencyError(Exception):
    """The root of this package's errors."""


class MalformedInput(IdempotencyError, ValueError):
    """What the client sent can't be used. ``str()`` is in English; a problem response has the request's language.

    ``template``: the English text, with a placeholder for each of ``values``.
    """

    def __init__(self, template: str = "", **values: object) -> None:
        super().__init__(template % values if values else template)
        self.template, self.values = template, values


class MalformedKey(MalformedInput):
    """The header holds no usable key. The client must send 1 to 255 visible ASCII characters.

    ``never_used``: no record can have what was sent as its key. False where a key was garbled on its way, perhaps, that
    an earlier request has used.
    """

    def __init__(self, template: str = "", *, never_used: bool = False, **values: object) -> None:
        super().__init__(template, **values)
        self.never_used = never_used


class MissingKey(IdempotencyError):
    """This operation needs an Idempotency-Key header, and the request has none."""


class AnonymousKey(IdempotencyError):
    """An anonymous caller sent a key, but the view states no scope for anonymous callers."""


class MalformedRequestTime(MalformedInput):
    """The header that says when the request was first sent holds no time. Send ``@`` and seconds since 1970 (UTC)."""


class RequestIncomplete(IdempotencyError):
    """The body is shorter than its ``Content-Length``: the upload was cut. The client must send all of it again."""

    def __init__(self, received: int, stated: int) -> None:
        super().__init__(f"{received} of {stated} bytes arrived.")


class NotAdmitted(IdempotencyError):
    """A new key may not be claimed now, by the policy's ``admit`` or its limits. Nothing was run or stored.

    ``retry_after``: seconds.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The key is new, and no new one is admitted for {retry_after} s.")
        self.retry_after = retry_after


class LateRetry(IdempotencyError):
    """The request was first sent longer ago than its key is remembered: it may have been executed then."""


class ReplayForbidden(IdempotencyError):
    """The policy's ``may_replay`` does not let this caller have the stored response. The record is unchanged."""


class ClaimInsideTransaction(IdempotencyError):
    """A key can't be claimed inside a transaction that is already open: other requests would not see the claim.

    Apply the entry point outside the transaction: above ``@transaction.atomic``, not below it. ``ATOMIC_REQUESTS``
    needs no change, the entry points see to it. Where ``IdempotencyMiddleware`` opened it, exempt the view from the
        middleware.
    """

    def __init__(self, using: str) -> None:
        super().__init__(f"{self.__doc__} (database {using!r})")


class ClaimLost(IdempotencyError):
    """This attempt no longer holds its claim: another one took over, or the record is gone."""


class TransactionEnded(IdempotencyError):
    """The transaction of a run in atomic mode ended before the run did, behind Django's back: nothing is stored for it.

    Something executed COMMIT or ROLLBACK past Django, or a statement that commits by itself; or the database rolled
    back everything, as MariaDB does with the victim of a deadlock, and the error was caught without an atomic block.
    Where the transaction was committed, or that can't be told, the key is on hold for an operator.
    """

    def __init__(self) -> None:
        super().__init__(
            "The transaction of this run was committed or rolled back behind Django's back. Leave COMMIT and ROLLBACK "
            "to transaction.atomic(), and let database errors leave the block in which they occur."
        )


class StoreUnavailable(IdempotencyError):
    """The idempotency store can't be reached. Only the same key is safe to retry: its operation may have happened."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The idempotency store can't be reached.")


class StoreRefused(StoreUnavailable):
    """The store answered that it can't do this now, and would say the same on another connection."""


class StoreConflict(StoreRefused):
    """Another transaction was in the way (lock not available, serialization failure): nothing was written."""


class PartitionsUnsupported(IdempotencyError):
    """Only PostgreSQL can partition the records."""

    def __init__(self, using: str) -> None:
        super().__init__(f"{self.__doc__} (database {using!r})")


class NotConvertible(IdempotencyError):
    """The table of the records can't be made partitioned, or plain again; the message says what is in the way."""


class IllegalMove(IdempotencyError):
    """A record can't go from the one status to the other; see ``django_idempotency.models.MOVES``."""


class DigestCollision(IdempotencyError):
    """Two different keys share one record id. Nothing was run; send the request under a new key."""


class TerminalFailure(Exception):
    """Raise it to respond with ``response`` for good: effects are rolled back, the response is stored and replayed.

    ``response`` has an error status, 400 to 599; ``ValueError`` otherwise, because nothing was done.
    """

    def __init__(self, response: HttpResponse) -> None:
        if response.status_code < 400:
            raise ValueError(f"TerminalFailure with status {response.status_code}: a failure has a status from 400 on.")
        super().__init__(f"terminal failure with status {response.status_code}")
        self.response = response
