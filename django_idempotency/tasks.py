"""Maintenance as Celery tasks, with a schedule for beat.

Settings may import this module for its schedule, before there are models: what needs those is imported later.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery import shared_task

from django_idempotency import celery_exit  # noqa: F401 (listens)

# A message lives for ``expires`` seconds, a run for ``time_limit``, and both together no longer than to the next
# message: so no run overlaps with the next, without a lock. ``max_seconds`` ends a run before the limit has to.
REAP_EVERY, CLEAN_EVERY, PARTITION_EVERY = 60.0, 600.0, 3600.0
REAP_LIMITS: dict[str, Any] = {"expires": 20, "soft_time_limit": 35, "time_limit": 40}
CLEAN_LIMITS: dict[str, Any] = {"expires": 240, "soft_time_limit": 330, "time_limit": 360}
PARTITION_LIMITS: dict[str, Any] = {"expires": 1200, "soft_time_limit": 2100, "time_limit": 2160}

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-reap": {
        "task": "django_idempotency.reap",
        "schedule": REAP_EVERY,
        "kwargs": {"max_seconds": 30},
        "options": REAP_LIMITS,
    },
    "idempotency-cleanup": {
        "task": "django_idempotency.cleanup",
        "schedule": CLEAN_EVERY,
        "kwargs": {"max_seconds": 300},
        "options": CLEAN_LIMITS,
    },
}
# For those who keep records for audit, but not the bodies.
BODIES_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-drop-bodies": {
        "task": "django_idempotency.drop_bodies",
        "schedule": CLEAN_EVERY,
        "kwargs": {"max_seconds": 300},
        "options": CLEAN_LIMITS,
    },
}
# For a partitioned table on PostgreSQL; on a plain one they do nothing.
PARTITIONS_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-ensure-partitions": {
        "task": "django_idempotency.ensure_partitions",
        "schedule": PARTITION_EVERY,
        "options": PARTITION_LIMITS,
    },
    "idempotency-drop-partitions": {
        "task": "django_idempotency.drop_partitions",
        "schedule": PARTITION_EVERY,
        "options": PARTITION_LIMITS,
    },
}


@shared_task(name="django_idempotency.reap")
def reap(**options: Any) -> dict[str, Any]:
    """``maintenance.reap``, with its options."""
    from django_idempotency import maintenance

    return asdict(maintenance.reap(**options))


@shared_task(name="django_idempotency.cleanup")
def cleanup(**options: Any) -> dict[str, Any]:
    """``maintenance.cleanup``, with its options."""
    from django_idempotency import maintenance

    return asdict(maintenance.cleanup(**options))


@shared_task(name="django_idempotency.drop_bodies")
def drop_bodies(**options: Any) -> dict[str, Any]:
    """``maintenance.drop_bodies``, with its options."""
    from django_idempotency import maintenance

    return asdict(maintenance.drop_bodies(**options))


@shared_task(name="django_idempotency.ensure_partitions")
def ensure_partitions(**options: Any) -> dict[str, Any]:
    """``partitions.ensure``, with its options."""
    from django_idempotency import partitions

    return asdict(partitions.ensure(**options))


@shared_task(name="django_idempotency.drop_partitions")
def drop_partitions(**options: Any) -> dict[str, Any]:
    """``partitions.drop``, with its options."""
    from django_idempotency import partitions

    return asdict(partitions.drop(**options))
