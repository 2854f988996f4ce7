"""Calls of one of Django's caches that may fail or be slow, and must not hold up requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.cache import caches

from django_idempotency.logs import cause, log

T = TypeVar("T")


class CacheGuard:
    """Leaves a cache alone that failed or was slow.

    ``alias``: in ``CACHES``. One that failed, or took more than ``patience`` seconds, is not asked for ``pause``.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def ask(self, what: Callable[[Any], T], alias: str, *, patience: float, pause: float) -> T | None:
        """Return what ``what`` makes of the cache; ``None`` where it fails or is left alone."""
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
