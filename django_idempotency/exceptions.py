"""What can go wrong, each with the sentence that says how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.http import HttpResponse


class IdempotencyError(Exception):
    """The root of this package's errors."""


class MalformedKey(IdempotencyError, ValueError):
    """The header holds no usable key. The client must send 1 to 255 visible ASCII characters."""


class MissingKey(IdempotencyError):
    """This operation needs an Idempotency-Key header, and the request has none."""


class AnonymousKey(IdempotencyError):
    """An anonymous caller sent a key, but the view states no scope for anonymous callers."""


class MalformedSentTime(IdempotencyError, ValueError):
    """The header that says when the request was first sent holds no time. Send ``@`` and seconds since 1970 (UTC)."""


class LateRetry(IdempotencyError):
    """The request was first sent longer ago than its key is remembered: it may have been executed then."""


class ClaimInsideTransaction(IdempotencyError):
    """A key can't be claimed inside a transaction that is already open: other requests would not see the claim.

    Apply the door outside the transaction: above ``@transaction.atomic``, not below it. ``ATOMIC_REQUESTS`` needs no
    change, the doors see to it. Where ``IdempotencyMiddleware`` opened it, exempt the view from the middleware.
    """

    def __init__(self, using: str) -> None:
        super().__init__(f"{self.__doc__} (database {using!r})")


class ClaimLost(IdempotencyError):
    """This attempt no longer holds its claim: another one took over, or the record is gone."""


class StoreUnavailable(IdempotencyError):
    """The idempotency store can't be reached.

    ``ran`` is true where the operation may have happened all the same, so that only the same key is safe to retry.
    """

    def __init__(self, message: str = "", *, ran: bool = False) -> None:
        super().__init__(message or "The idempotency store can't be reached.")
        self.ran = ran


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
    """Raise it to answer with ``response`` for good: effects are rolled back, the answer is stored and replayed.

    ``response`` has an error status, 400 to 599; ``ValueError`` otherwise, because nothing was done.
    """

    def __init__(self, response: HttpResponse) -> None:
        if response.status_code < 400:
            raise ValueError(f"TerminalFailure with status {response.status_code}: a failure has a status from 400 on.")
        super().__init__(f"terminal failure with status {response.status_code}")
        self.response = response
