"""The exceptions of this package. Each one says what went wrong and, if possible, how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.http import HttpResponse


class IdempotencyError(Exception):
    """The base class of this package's errors."""


class MalformedKey(IdempotencyError, ValueError):
    """The header has no usable key. The client must send 1 to 255 visible ASCII characters.

    ``str()`` is in English; a problem response is in the request's language.
    ``template``: the English text, with a placeholder for each of ``values``. ``never_used``: whether no record can
    have this key. It is false if the header may be the garbled form of a key that an earlier request used.
    """

    def __init__(
        self, template: str = "", *, never_used: bool = False, **values: object
    ) -> None:
        super().__init__(template % values)
        self.template, self.values = template, values
        self.never_used = never_used


class MissingKey(IdempotencyError):
    """This operation needs an Idempotency-Key header, and the request has none."""


class AnonymousKey(IdempotencyError):
    """A key came from a caller who is not a user, but the view has no scope for such callers."""


class RequestIncomplete(IdempotencyError):
    """The body is shorter than its ``Content-Length``: the upload was cut off. The client must send all of it again."""

    def __init__(self, received: int, stated: int) -> None:
        super().__init__(f"{received} of {stated} bytes arrived.")


class NotAdmitted(IdempotencyError):
    """The policy's ``admit`` or limits refuse to admit a new key now. Nothing was run or stored.

    ``retry_after``: seconds after which to ask again.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            f"The key is new, and no new keys are admitted for {retry_after} s."
        )
        self.retry_after = retry_after


class ReplayForbidden(IdempotencyError):
    """The policy's ``may_replay`` does not allow this caller to get the stored response. The record is unchanged."""


class ClaimInsideTransaction(IdempotencyError):
    """A key can't be claimed inside a transaction that is already open: other requests would not see the claim."""

    def __init__(self, using: str) -> None:
        super().__init__(
            f"A key can't be claimed inside a transaction that is already open (database {using!r}): other requests "
            "would not see the claim. Apply the entry point outside the transaction: above @transaction.atomic, not "
            "below it. ATOMIC_REQUESTS needs no change; the entry points handle it, except one on a method: put it on "
            "the class. Under IdempotencyMiddleware, give the view an entry point of its own, or exempt it. A "
            "middleware may have opened it too, as django-reversion's does: remove that, or turn its transaction off."
        )


class ClaimLost(IdempotencyError):
    """This attempt no longer holds its claim: another attempt took over, or the record is gone."""


class TransactionEnded(IdempotencyError):
    """The transaction of a run in atomic mode ended before the run did, without Django knowing. Nothing is stored.

    Either a COMMIT, a ROLLBACK or a statement with an implicit commit was executed without Django's transaction API; or
    the database rolled back the whole transaction, as MariaDB does for the victim of a deadlock, and the error was
    caught without an atomic block. If the transaction was committed, or that can't be determined, the key is on hold.
    """

    def __init__(self) -> None:
        super().__init__(
            "The transaction of this run was committed or rolled back behind Django's back. Leave COMMIT and ROLLBACK "
            "to transaction.atomic(), and let database errors leave the block in which they occur."
        )


class StoreUnavailable(IdempotencyError):
    """The idempotency store can't be reached. Retry only with the same key: the operation may have happened.

    ``claimed``: whether the key was claimed before that.
    """

    claimed = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The idempotency store can't be reached.")


class StoreRefused(StoreUnavailable):
    """The store refused: it can't do this now. Another connection would get the same error."""


class StoreConflict(StoreRefused):
    """Another transaction prevented this (lock not available, serialization failure). Nothing was written."""


class NotConvertible(IdempotencyError):
    """The table of the records can't be partitioned. The message says why."""


class IllegalMove(IdempotencyError):
    """A record can't move from one status to the other; see ``django_idempotency.models.MOVES``."""


class DigestCollision(IdempotencyError):
    """Two different keys have the same record id. Nothing was run; send the request with a new key."""


class TerminalFailure(Exception):
    """Raise this to make ``response`` final: effects are rolled back, and the response is stored and replayed.

    ``response`` must have an error status, 400 to 599, because nothing was done. Raises ``ValueError`` otherwise.
    """

    def __init__(self, response: HttpResponse) -> None:
        if response.status_code < 400:
            raise ValueError(
                f"TerminalFailure with status {response.status_code}: the status of a failure must be at least 400."
            )
        super().__init__(f"terminal failure with status {response.status_code}")
        self.response = response
