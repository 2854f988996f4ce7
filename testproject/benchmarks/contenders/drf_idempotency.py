"""https://pypi.org/project/drf-idempotency/, "Quick Start"."""

from __future__ import annotations

from testproject.benchmarks.contenders import Contender

CONTENDER = Contender(
    title="drf-idempotency",
    requirements=["drf-idempotency==1.0.0"],
    apps=["drf_idempotency"],
    middleware=["drf_idempotency.middleware.IdempotencyMiddleware"],
    settings={
        "IDEMPOTENCY": {"BACKEND": "drf_idempotency.backends.database.DatabaseBackend"}
    },
)
