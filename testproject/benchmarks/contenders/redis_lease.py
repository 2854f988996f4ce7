"""In lease mode, with the records in Redis."""

from __future__ import annotations

import os
from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from django_idempotency.rest_framework import IdempotentMixin
    from django_idempotency.values.policy import Policy

    return behind(
        IdempotentMixin, view, idempotency_policy=Policy(mode="lease", store="redis")
    )


CONTENDER = Contender(
    title="ours, Redis",
    apps=["django_idempotency"],
    settings={
        "IDEMPOTENCY": {
            "STORES": {
                "redis": {
                    "BACKEND": "django_idempotency.contrib.redis.RedisStore",
                    "OPTIONS": {"url": os.environ.get("REDIS_URL", "")},
                }
            }
        }
    },
    protect=protect,
    redis=True,
)
