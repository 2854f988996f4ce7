"""Whether a new key may be claimed now: by ``admit``, and by limits for each scope,
counted in one of Django's caches.

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
from django_idempotency.reporting.logs import cause, log
from django_idempotency.values.outcomes import EntryPoint, Operation, StoredResponse
from django_idempotency.values.policy import Limits, Policy, is_async

T = TypeVar("T")

MINUTE = 60
PATIENCE, PAUSE = 0.25, 5.0  # seconds
PREFIX = "idempotency:count:"
REQUESTS = (EntryPoint.MIXIN, EntryPoint.DECORATOR, EntryPoint.MIDDLEWARE)


def asks_admission(operation: Operation, policy: Policy) -> bool:
    """Whether a new key of ``operation`` has to be admitted: those of requests, by a
    policy with ``admit``.
    """
    return policy.admit is not None and operation.entry_point in REQUESTS


def refused_for(operation: Operation, policy: Policy) -> int | None:
    """Return the seconds to wait before asking again. If a new key is admitted, count
    it and return ``None``.
    """
    limits: Any = policy.admit
    if isinstance(limits, Limits):
        return _refused_by(limits, operation, policy)
    answer = (async_to_sync(limits) if is_async(limits) else limits)(operation)
    if answer is True:
        return None
    is_time = (
        isinstance(answer, int | float)
        and not isinstance(answer, bool)
        and 0 < answer < math.inf
    )
    return math.ceil(answer) if is_time else MINUTE


def count_stored(
    operation: Operation, policy: Policy, response: StoredResponse
) -> None:
    """Count the bytes of a response that was stored, if the policy limits them."""
    if (
        isinstance(policy.admit, Limits)
        and policy.admit.bytes is not None
        and asks_admission(operation, policy)
    ):
        bytes_in_headers = sum(
            len(name) + len(value) for name, value in response.headers
        )
        bytes_of(operation, policy, policy.admit.bytes).add(
            len(response.body or b"") + bytes_in_headers
        )


def bytes_of(operation: Operation, policy: Policy, limit: int) -> Count:
    return Count("bytes", operation.scope, limit, policy.kept_for)


def _refused_by(limits: Limits, operation: Operation, policy: Policy) -> int | None:
    if limits.bytes is not None:
        stored = bytes_of(operation, policy, limits.bytes)
        if stored.read() >= limits.bytes:
            return stored.ends_in
    if limits.new_keys is not None:
        keys = Count("keys", operation.scope, limits.new_keys, MINUTE)
        if keys.add(1) > limits.new_keys:
            return keys.ends_in
    return None


class Count:
    """A count of ``what``, for a scope and a limit, in the current window of
    ``seconds`` by the clock.
    """

    def __init__(
        self, what: str, scope: str, limit: float | None, seconds: float
    ) -> None:
        now = time.time()
        digest = hashlib.sha256(
            f"{what} {limit} {seconds} {scope}".encode()
        ).hexdigest()[:32]
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
            return int(cache.incr(self.key, amount))
        if cache.add(self.key, amount, math.ceil(self.seconds) + MINUTE):
            return amount
        return int(cache.incr(self.key, amount))

    def _ask(self, what: Callable[[Any], T]) -> T | None:
        alias = conf().limits_cache
        return _guards.setdefault(alias, CacheGuard()).ask(
            what, alias, patience=PATIENCE, pause=PAUSE
        )


# --- A cache that fails or is slow does not hold up requests --------------------------


class CacheGuard:
    """Stops calling a cache for a while after it has failed or been slow.

    A cache that failed, or took more than ``patience`` seconds, is not called for
    ``pause`` seconds.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def ask(
        self, what: Callable[[Any], T], alias: str, *, patience: float, pause: float
    ) -> T | None:
        """Return ``what(cache)`` for the cache ``alias`` in ``CACHES``; ``None`` if it
        fails or the cache is paused.
        """
        begun = time.monotonic()
        if begun < self.until:
            return None
        try:
            return what(caches[alias])
        except Exception as error:  # a cache may raise anything
            self.until = time.monotonic() + pause
            log(
                logging.WARNING,
                "cache_error",
                "idempotency: the cache %r failed: %s",
                alias,
                cause(error),
            )
            return None
        finally:
            if time.monotonic() - begun > patience:
                self.until = time.monotonic() + pause


_guards: dict[str, CacheGuard] = {}
