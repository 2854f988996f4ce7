"""https://pypi.org/project/django-idempotency-key/, "Configuration", with its lock for
several processes.
"""

from __future__ import annotations

import os

from testproject.benchmarks.contenders import Contender

REDIS_URL = os.environ.get("REDIS_URL", "")

CONTENDER = Contender(
    title="django-idempotency-key",
    requirements=["django-idempotency-key==1.3.0"],
    middleware=["idempotency_key.middleware.IdempotencyKeyMiddleware"],
    settings={
        "CACHES": {
            "default": {
                "BACKEND": "django.core.cache.backends.redis.RedisCache",
                "LOCATION": REDIS_URL,
            }
        },
        "IDEMPOTENCY_KEY": {
            "STORAGE": {
                "CLASS": "idempotency_key.storage.CacheKeyStorage",
                "CACHE_NAME": "default",
            },
            "LOCK": {
                "CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock",
                "LOCATION": REDIS_URL,
            },
        },
    },
    redis=True,
)
