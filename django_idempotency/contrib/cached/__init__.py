from __future__ import annotations

from django_idempotency.contrib.cached.store import CachedStore

__all__ = ["CachedStore"]
