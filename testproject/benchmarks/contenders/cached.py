"""In atomic mode, with a cache in front of the database."""

from __future__ import annotations

import os
from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from django_idempotency.rest_framework import IdempotentMixin

    return behind(IdempotentMixin, view)


CONTENDER = Contender(
    title="ours, cached",
    apps=["django_idempotency"],
    settings={
        "CACHES": {
            "default": {
                "BACKEND": "django.core.cache.backends.redis.RedisCache",
                "LOCATION": os.environ.get("REDIS_URL", ""),
            }
        },
        "IDEMPOTENCY": {
            "STORES": {
                "default": {"BACKEND": "django_idempotency.contrib.cached.CachedStore"}
            },
        },
    },
    protect=protect,
    redis=True,
)
