"""Guards calls to Django's caches, so that a cache that fails or is slow does not hold up requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.cache import caches

from django_idempotency.reporting.logs import cause, log

T = TypeVar("T")


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
