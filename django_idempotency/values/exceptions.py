"""The exceptions of this package. Each one says what went wrong and, if possible, how
to fix it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.printable import printable_lines

if TYPE_CHECKING:
    from django.http import HttpResponse


class IdempotencyError(Exception):
    """The base class of this package's errors."""


class UnusableKey(IdempotencyError, ValueError):
    """The request has no key that can be used.

    ``str()`` is in English; a problem response is in the request's language.
    ``template``: the English text, with a placeholder for each of ``values``.
    ``never_used``: whether no record can have this key. It is false if the header may
    be the garbled form of a key that an earlier request used.
    """

    def __init__(
        self, template: str = "", *, never_used: bool = False, **values: object
    ) -> None:
        super().__init__(template % values)
        self.template, self.values = template, values
        self.never_used = never_used


class MalformedKey(UnusableKey):
    """The request has something else where its key should be. The client must send 1 to
    255 visible ASCII characters.
    """


class MissingKey(UnusableKey):
    """This operation needs an idempotency key, and the request has none."""


class AnonymousKey(IdempotencyError):
    """A key came from a caller who is not a user, but the view has no scope for such
    callers.
    """


class RequestIncomplete(IdempotencyError):
    """The body is shorter than its ``Content-Length``: the upload was cut off. The
    client must send all of it again.
    """

    def __init__(self, received: int, stated: int) -> None:
        super().__init__(f"{received} of {stated} bytes arrived.")


class NotAdmitted(IdempotencyError):
    """The policy's ``admit`` or limits refuse to admit a new key now. Nothing was run
    or stored.

    ``retry_after``: seconds after which to ask again.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            f"The key is new, and no new keys are admitted for {retry_after} s."
        )
        self.retry_after = retry_after


class ReplayForbidden(IdempotencyError):
    """The policy's ``may_replay`` does not allow this caller to get the stored
    response. The record is unchanged.
    """


class ClaimInsideTransaction(IdempotencyError):
    """A key can't be claimed inside a transaction that is already open: other requests
    would not see the claim.
    """

    def __init__(self, using: str) -> None:
        super().__init__(
            "A key can't be claimed inside a transaction that is already open"
            f" (database {using!r}): other requests would not see the claim. Apply the"
            " entry point outside the transaction: above @transaction.atomic, not"
            " below it. ATOMIC_REQUESTS needs no change; the entry points handle it,"
            " except one on a method: put it on the class. Under"
            " IdempotencyMiddleware, give the view an entry point of its own, or"
            " exempt it. A middleware may have opened it too, as django-reversion's"
            " does: remove that, or turn its transaction off."
        )


class ClaimLost(IdempotencyError):
    """This attempt no longer holds its claim: another attempt took over, or the record
    is gone.
    """


class TransactionEnded(IdempotencyError):
    """The transaction of a run in atomic mode ended before the run did, without Django
    knowing. Nothing is stored.

    Either a COMMIT, a ROLLBACK or a statement with an implicit commit was executed
    without Django's transaction API; or the database rolled back the whole transaction,
    as MariaDB does for the victim of a deadlock, and the error was caught without an
    atomic block. If the transaction was committed, or that can't be determined, the key
    is on hold.
    """

    def __init__(self) -> None:
        super().__init__(
            "The transaction of this run was committed or rolled back behind Django's"
            " back. Leave COMMIT and ROLLBACK to transaction.atomic(), and let database"
            " errors leave the block in which they occur."
        )


class NotRun(IdempotencyError):
    """Nothing was run: another process runs the function under this key, or the key is
    on hold for an operator.

    ``delay``: seconds after which to call again. ``reason``: text.
    """

    def __init__(self, reason: str, delay: float) -> None:
        super().__init__(reason, delay)
        self.reason, self.delay = reason, delay

    def __str__(self) -> str:
        return self.reason


class Rejected(IdempotencyError):
    """The function will not be run under this key: the key was used with other
    arguments, an operator has marked it as failed, or the function raised
    ``RejectMessage``.
    """


class StoreUnavailable(IdempotencyError):
    """The idempotency store can't be reached. Retry only with the same key: the
    operation may have happened.

    ``fails_open``: whether ``fail_open`` applies. It does not once the key was claimed,
    nor to a wrong configuration.
    """

    fails_open = True

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The idempotency store can't be reached.")


class StoreRefused(StoreUnavailable):
    """The store refused: it can't do this now. Another connection would get the same
    error.
    """


class StoreConflict(StoreRefused):
    """Another transaction prevented this (lock not available, serialization failure).
    Nothing was written.
    """


class IllegalMove(IdempotencyError):
    """A record can't move from one status to the other; see
    ``django_idempotency.models.MOVES``.
    """


class DigestCollision(IdempotencyError):
    """Two different keys have the same record id. Nothing was run; send the request
    with a new key.
    """


class Hold(Exception):
    """Raise this to put the key on hold, if it is unknown what has happened ("the bank
    says maybe").

    ``reason``: a sentence for the operator who has to decide. Retries are refused until
    then. In atomic mode, effects are rolled back. ``response``: what the caller gets;
    the entry point sets it.
    """

    response: HttpResponse | None = None

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        # it may quote anything, and a database can't store a NUL
        self.reason = printable_lines(str(reason))


class TerminalFailure(Exception):
    """Raise this to make ``response`` final: effects are rolled back, and the response
    is stored and replayed.

    ``response`` must have an error status, 400 to 599, because nothing was done. Raises
    ``ValueError`` otherwise.
    """

    def __init__(self, response: HttpResponse) -> None:
        if response.status_code < 400:
            raise ValueError(
                f"TerminalFailure with status {response.status_code}: the status of a"
                " failure must be at least 400."
            )
        super().__init__(f"terminal failure with status {response.status_code}")
        self.response = response
