"""In atomic mode, with a cache in the process's memory in front of the database: the
fastest possible cache.
"""

from __future__ import annotations

from testproject.benchmarks.contenders import Contender
from testproject.benchmarks.contenders.atomic import protect

CONTENDER = Contender(
    title="ours, cached in the process",
    apps=["django_idempotency"],
    settings={
        "IDEMPOTENCY": {
            "STORES": {
                "default": {"BACKEND": "django_idempotency.contrib.cached.CachedStore"}
            }
        },
    },
    protect=protect,
)
