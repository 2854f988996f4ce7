"""A Celery task that deletes published events, with a schedule for beat. Settings may import this module."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery import shared_task

LIMITS: dict[str, Any] = {"expires": 240, "soft_time_limit": 330, "time_limit": 360}

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-outbox-cleanup": {
        "task": "django_idempotency.outbox.cleanup",
        "schedule": 600.0,
        "kwargs": {"max_seconds": 300},
        "options": LIMITS,
    },
}


@shared_task(name="django_idempotency.outbox.cleanup")
def cleanup(**options: Any) -> dict[str, Any]:
    """Run ``maintenance.cleanup`` with its options."""
    from django_idempotency.outbox import maintenance

    return asdict(maintenance.cleanup(**options))
