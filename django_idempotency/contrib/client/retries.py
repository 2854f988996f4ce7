"""When a client retries a request, how long it waits before, and with which key. This module sends nothing itself."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

PROBLEM_JSON = "application/problem+json"
# RFC 9110, section 9.2.2: several identical requests have the same effect as one.
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
# The server is busy or failed. The same request may succeed later.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
MOST_DOUBLINGS = 64  # of the wait, which has reached its maximum by then
# The caller has to authenticate before a retry makes sense.
NEEDS_CALLER = "idempotency_key_anonymous"


def new_key() -> str:
    """Return a new key as a value for the header: a UUID in quotes."""
    return f'"{uuid.uuid4()}"'


@dataclass(frozen=True, kw_only=True)
class Retries:
    """When a client retries a request. Immutable, so that any number of threads can share it.

    ``attempts``: maximum number of requests in one call, including the first. ``total``: seconds after the beginning of
    the first attempt during which others may begin; the client's own timeout limits how long one attempt lasts.
    ``first_wait``: seconds before the first retry. The wait is doubled for each further retry up to ``longest_wait``
    seconds, and shortened at random by up to a half. A longer ``Retry-After`` is obeyed; if it goes beyond ``total``,
    there is no retry. ``methods``: methods that get a key, unless the request has one. ``header``: the key's header.

    A POST or PATCH request without a key is never retried.
    """

    attempts: int = 6
    total: float = 120.0
    first_wait: float = 0.5
    longest_wait: float = 20.0
    methods: Collection[str] = ("POST", "PUT", "PATCH", "DELETE")
    header: str = "Idempotency-Key"


class Call:
    """One call: attempts with one key, until there is a response to return or no more attempt is allowed.

    It adds a key to ``headers``, which must be case-insensitive, if it needs one.
    """

    def __init__(self, retries: Retries, method: str, headers: MutableMapping[str, str]) -> None:
        self.retries = retries
        self.headers = headers
        self.own_key = method.upper() in retries.methods and retries.header not in headers
        if self.own_key:
            headers[retries.header] = new_key()
        self.keyed = retries.header in headers
        self.repeatable = self.keyed or method.upper() in IDEMPOTENT_METHODS
        self.attempts = 1
        self.began = time.monotonic()

    def after_failure(self) -> float | None:
        """Return the seconds to wait after an attempt without a response; ``None`` if there is no next attempt."""
        return self._wait(None) if self.repeatable else None

    def after_response(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> float | None:
        """Return the seconds to wait before the next attempt; ``None`` if the caller gets this response."""
        match advice(status, headers, body):
            case Advice.RETRY if self.repeatable:
                return self._wait(retry_after(headers))
            # Only for the first attempt: an earlier one may have taken effect under the key, whatever this one says.
            case Advice.NEW_KEY if self.attempts == 1 and (self.own_key or not self.keyed):
                self.headers[self.retries.header] = new_key()
                self.keyed = self.repeatable = True
                return self._next(0)
        return None

    def _wait(self, asked: float | None) -> float | None:
        own = min(self.retries.first_wait * 2 ** min(self.attempts - 1, MOST_DOUBLINGS), self.retries.longest_wait)
        return self._next(max(random.uniform(own / 2, own), asked or 0))

    def _next(self, wait: float) -> float | None:
        late = time.monotonic() - self.began + wait > self.retries.total
        if late or self.attempts >= self.retries.attempts:
            return None
        self.attempts += 1
        return wait


class Advice(Enum):
    """What a response advises: take it, send the request again, or send it again with a new key."""

    TAKE = auto()
    RETRY = auto()
    NEW_KEY = auto()


def advice(status: int, headers: Mapping[str, str], body: bytes = b"") -> Advice:
    """Return what a response advises, by its problem document, ``X-Should-Retry`` or its status, in this order."""
    problem = _problem(headers, body)
    retryable = problem.get("retryable")
    if retryable is False and problem.get("safe_new_key") is True:
        return Advice.NEW_KEY
    if not isinstance(retryable, bool):
        should = headers.get("X-Should-Retry")
        retryable = should == "true" if should in ("true", "false") else status in TRANSIENT
    return Advice.RETRY if retryable and problem.get("code") != NEEDS_CALLER else Advice.TAKE


def is_problem(headers: Mapping[str, str]) -> bool:
    """Return whether the body of a response with these headers is a problem document."""
    return headers.get("Content-Type", "").lower().startswith(PROBLEM_JSON)


def _problem(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    if not is_problem(headers):
        return {}
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def retry_after(headers: Mapping[str, str], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, as a number or as a date; ``None`` if it asks for nothing.

    A date is compared with the response's own ``Date``, so that the client's clock does not matter.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    until = _date(value)
    if until is None:
        return None
    return max(0.0, (until - (_date(headers.get("Date", "")) or now())).total_seconds())


def _date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
