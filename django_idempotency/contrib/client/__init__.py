"""For Python clients of an API with idempotency keys: one key for each call, and safe
retries.

This module decides when a client retries, and how long it waits before.
``client.httpx`` has transports, and ``client.requests`` has an adapter, which send the
requests. None of them needs Django or settings.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

KEYED = frozenset({"POST", "PUT", "PATCH", "DELETE"})  # methods that get a key
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# The server is busy or failed. The same request may succeed later.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
MOST_DOUBLINGS = 64  # of the wait, which has reached its maximum by then


@dataclass(frozen=True, kw_only=True)
class Retries:
    """When a client retries a request. Immutable, so that any number of threads can
    share it.

    ``attempts``: maximum number of requests in one call, including the first.
    ``total``: seconds after the beginning of the first attempt during which others may
    begin; the client's own timeout limits how long one attempt lasts. ``first_wait``:
    seconds before the first retry. The wait is doubled for each further retry up to
    ``longest_wait`` seconds, and shortened at random by up to a half. A longer
    ``Retry-After`` in seconds is obeyed; if it goes beyond ``total``, there is no
    retry. ``header``: the key's header.
    """

    attempts: int = 6
    total: float = 120.0
    first_wait: float = 0.5
    longest_wait: float = 20.0
    header: str = "Idempotency-Key"


class Call:
    """One call: attempts with one key, until there is a response to return or no more
    attempt is allowed.

    It adds a key to ``headers``, which must be case-insensitive, if the method needs
    one and there is none. A request without a key is only retried if its method is
    safe.
    """

    def __init__(
        self, retries: Retries, method: str, headers: MutableMapping[str, str]
    ) -> None:
        self.retries = retries
        if method.upper() in KEYED:
            headers.setdefault(retries.header, f'"{uuid.uuid4()}"')
        self.keyed = retries.header in headers
        self.repeatable = self.keyed or method.upper() in SAFE
        self.attempts = 1
        self.began = time.monotonic()

    def after_failure(self) -> float | None:
        """Return the seconds to wait after an attempt without a response; ``None`` if
        there is no next attempt.
        """
        return self._next_wait(0)

    def after_response(self, status: int, headers: Mapping[str, str]) -> float | None:
        """Return the seconds to wait before the next attempt; ``None`` if the caller
        gets this response.
        """
        return (
            self._next_wait(retry_after(headers))
            if should_retry(status, headers)
            else None
        )

    def _next_wait(self, asked: float) -> float | None:
        own = min(
            self.retries.first_wait * 2 ** min(self.attempts - 1, MOST_DOUBLINGS),
            self.retries.longest_wait,
        )
        wait = max(random.uniform(own / 2, own), asked)
        late = time.monotonic() - self.began + wait > self.retries.total
        if late or not self.repeatable or self.attempts >= self.retries.attempts:
            return None
        self.attempts += 1
        return wait


def should_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether the same request may succeed later, by ``X-Should-Retry`` or else
    by the status.
    """
    stated = headers.get("X-Should-Retry")
    return stated == "true" if stated in ("true", "false") else status in TRANSIENT


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that ``Retry-After`` asks for; 0 if it has no number."""
    value = headers.get("Retry-After", "").strip()
    return float(value) if value.isascii() and value.isdigit() else 0
