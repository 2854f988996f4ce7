"""Maintenance as Celery tasks, with schedules for beat.

Settings may import this module for its schedules before models are loaded, so ``jobs`` imports models only on use.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task
from celery.signals import beat_init

from django_idempotency import celery_exit, jobs  # noqa: F401 (listens)

# A message lives for ``expires`` seconds and a run for ``time_limit``. Together they end no later than the next message
# is sent, so no run overlaps with the next one, without a lock. ``max_seconds`` ends a run before the limits have to.
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
# For projects that keep records for audit, but not their bodies.
BODIES_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-drop-bodies": {
        "task": "django_idempotency.drop_bodies",
        "schedule": CLEAN_EVERY,
        "kwargs": {"max_seconds": 300},
        "options": CLEAN_LIMITS,
    },
}
# For a partitioned table on PostgreSQL. On a plain table these tasks do nothing.
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


@beat_init.connect
def begin_at_once(sender: Any, **_named: Any) -> None:
    """Make tasks that beat has never run due at once.

    Otherwise a beat that restarts within each interval would never run them.
    """
    for entry in sender.scheduler.schedule.values():
        interval = getattr(entry.schedule, "run_every", None)
        if entry.task.startswith("django_idempotency.") and not entry.total_run_count and interval:
            entry.last_run_at = entry.schedule.now() - interval


reap = shared_task(name="django_idempotency.reap")(jobs.reap)
cleanup = shared_task(name="django_idempotency.cleanup")(jobs.cleanup)
drop_bodies = shared_task(name="django_idempotency.drop_bodies")(jobs.drop_bodies)
ensure_partitions = shared_task(name="django_idempotency.ensure_partitions")(jobs.ensure_partitions)
drop_partitions = shared_task(name="django_idempotency.drop_partitions")(jobs.drop_partitions)
