"""How a consumer handles its messages: its options, and what its adapters decide
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.messages.message import (
    Delivery,
    Exhausted,
    Malformed,
    Message,
    Reject,
    Retry,
)
from django_idempotency.messages.results import PLAIN_JSON, Codec
from django_idempotency.values.outcomes import EntryPoint, Verdict
from django_idempotency.values.policy import Policy

MAX_ATTEMPTS = 10
MAX_CRASHES = 10
UNLIMITED = 1_000_000  # the caller knows when to give up
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Seconds before the next attempt: ``first``, then ``factor`` times longer after
    each, at most ``longest``.
    """

    first: float = 1
    factor: float = 2
    longest: float = 300

    def __call__(self, attempt: int) -> float:
        return min(self.first * self.factor ** min(attempt - 1, 100), self.longest)


BACKOFF = Backoff()


@dataclass(frozen=True, eq=False)
class Handling:
    """What an attempt asks of its ``Consumer``, where the options are described."""

    name: str
    handler: Callable[..., Any]
    _: KW_ONLY
    policy: Policy | None = None
    max_attempts: int = MAX_ATTEMPTS
    backoff: Callable[[int], float] = BACKOFF
    codec: Codec = PLAIN_JSON
    sender: object = None
    entry_point: EntryPoint = EntryPoint.CONSUMER
    # the id under which the crashes of its messages are counted; without one, their
    # attempts are, by the record of each
    counted_by: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ImproperlyConfigured(
                f"The consumer's name is {self.name!r}; use 1 to 100 letters, digits,"
                " dots, hyphens or underscores."
            )
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ImproperlyConfigured(
                f"max_attempts is {self.max_attempts!r}; it must be an integer of at"
                " least 1."
            )

    # --- What adapters decide otherwise

    def verdict_on(self, error: Exception) -> Verdict | None:
        """Return the verdict on the record when the handler raises ``error``, or
        ``None`` if a retry runs again.
        """
        return None

    def verdict_on_result(self, result: Any) -> Verdict | None:
        """Return the verdict on the record when the handler returns ``result``, or
        ``None`` to keep the result.
        """
        return None

    def after_mismatch(self, *, running: bool) -> Delivery:
        """Return what to tell the broker of a message with another body, whose first
        one may be ``running``.
        """
        return Malformed("its id was first used for a message with a different body")

    def scope_of(self, message: Message) -> str:
        """Return the scope of the message's id."""
        return f"consumer:{self.name}:{message.source}"

    def after(self, error: Exception, attempt: int, limit: int) -> Retry | Reject:
        """Return what to tell the broker when the handler raised ``error`` in attempt
        ``attempt`` of ``limit``.
        """
        reason = f"{type(error).__name__}: {error}".strip(": ")
        if attempt >= limit:
            return Exhausted(f"attempt {attempt} of {limit} failed: {reason}", attempt)
        return Retry(self.backoff(attempt), reason, attempt, error)
