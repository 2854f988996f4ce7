from __future__ import annotations

from django_idempotency.contrib.redis.store import RedisStore

__all__ = ["RedisStore"]
