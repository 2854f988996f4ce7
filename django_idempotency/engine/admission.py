"""Whether a new key may be claimed now: by ``admit``, and by limits for each scope, counted in one of Django's caches.

A limit never stops requests because its cache is unavailable. Nothing is counted then.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.core.cache import caches

from django_idempotency.conf import conf
from django_idempotency.policy import Limits, Policy, is_async
from django_idempotency.reporting.logs import cause, log
from django_idempotency.values.outcomes import EntryPoint, Operation, StoredResponse

T = TypeVar("T")

MINUTE = 60
PATIENCE, PAUSE = 0.25, 5.0  # seconds
PREFIX = "idempotency:count:"
REQUESTS = (EntryPoint.MIXIN, EntryPoint.DECORATOR, EntryPoint.MIDDLEWARE)


def admission_of(operation: Operation, policy: Policy) -> Admission | None:
    """Return what decides about the key of a request; ``None`` without limits, and for messages."""
    return Admission(policy) if policy.admit is not None and operation.entry_point in REQUESTS else None


class Admission:
    """Decides about the key of one request, and counts it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.new_keys, self.bytes = None, None
        if isinstance(policy.admit, Limits):
            self.new_keys, self.bytes = policy.admit.new_keys, policy.admit.bytes
        self.counted: Count | None = None

    def refused_for(self, operation: Operation) -> int | None:
        """Return the seconds to wait before asking again. If a new key is admitted, count it and return ``None``."""
        return self._stored_too_much(operation) or self._not_admitted(operation) or self._too_many(operation)

    def give_back(self) -> None:
        """Stop counting the key, which turned out not to be new."""
        if self.counted is not None:
            self.counted.add(-1)
            self.counted = None

    def stored(self, operation: Operation, response: StoredResponse) -> None:
        if self.bytes is not None:
            bytes_in_headers = sum(len(name) + len(value) for name, value in response.headers)
            self._bytes_of(operation).add(len(response.body or b"") + bytes_in_headers)

    def _stored_too_much(self, operation: Operation) -> int | None:
        if self.bytes is None:
            return None
        count = self._bytes_of(operation)
        return count.ends_in if count.read() >= self.bytes else None

    def _bytes_of(self, operation: Operation) -> Count:
        return Count("bytes", operation.scope, self.bytes, self.policy.kept_for)

    def _not_admitted(self, operation: Operation) -> int | None:
        admit: Any = self.policy.admit
        if not callable(admit):
            return None
        answer = (async_to_sync(admit) if is_async(admit) else admit)(operation)
        if answer is True:
            return None
        is_time = isinstance(answer, int | float) and not isinstance(answer, bool) and 0 < answer < math.inf
        return math.ceil(answer) if is_time else MINUTE

    def _too_many(self, operation: Operation) -> int | None:
        if self.new_keys is None:
            return None
        count = Count("keys", operation.scope, self.new_keys, MINUTE)
        keys = count.add(1)
        self.counted = count if keys else None
        if keys <= self.new_keys:
            return None
        self.give_back()
        return count.ends_in


class Count:
    """A count of ``what``, for a scope and a limit, in the current window of ``seconds`` by the clock."""

    def __init__(self, what: str, scope: str, limit: float | None, seconds: float) -> None:
        now = time.time()
        digest = hashlib.sha256(f"{what} {limit} {seconds} {scope}".encode()).hexdigest()[:32]
        self.key = f"{PREFIX}{digest}:{int(now // seconds)}"
        self.seconds = seconds
        self.ends_in = math.ceil(seconds - now % seconds) or 1

    def read(self) -> int:
        return self._ask(lambda cache: int(cache.get(self.key, 0))) or 0

    def add(self, amount: int) -> int:
        """Add ``amount`` and return the count; 0 if nothing could be counted."""
        return self._ask(partial(self._add, amount)) or 0

    def _add(self, amount: int, cache: Any) -> int:
        with suppress(ValueError):  # nothing is counted yet
            return int(cache.incr(self.key, amount) if amount > 0 else cache.decr(self.key, -amount))
        if amount <= 0 or cache.add(self.key, amount, math.ceil(self.seconds) + MINUTE):
            return amount
        return int(cache.incr(self.key, amount))

    def _ask(self, what: Callable[[Any], T]) -> T | None:
        alias = conf().limits_cache
        return _guards.setdefault(alias, CacheGuard()).ask(what, alias, patience=PATIENCE, pause=PAUSE)


# --- A cache that fails or is slow does not hold up requests ---------------------------------------------------------


class CacheGuard:
    """Stops calling a cache for a while after it has failed or been slow.

    A cache that failed, or took more than ``patience`` seconds, is not called for ``pause`` seconds.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def ask(self, what: Callable[[Any], T], alias: str, *, patience: float, pause: float) -> T | None:
        """Return ``what(cache)`` for the cache ``alias`` in ``CACHES``; ``None`` if it fails or the cache is paused."""
        begun = time.monotonic()
        if begun < self.until:
            return None
        try:
            return what(caches[alias])
        except Exception as error:  # a cache may raise anything
            self.until = time.monotonic() + pause
            log(logging.WARNING, "cache_error", "idempotency: the cache %r failed: %s", alias, cause(error))
            return None
        finally:
            if time.monotonic() - begun > patience:
                self.until = time.monotonic() + pause


_guards: dict[str, CacheGuard] = {}
