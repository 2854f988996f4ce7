"""The passes of maintenance as Celery tasks, with schedules for beat, which settings
may import.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task
from celery.signals import beat_init, worker_process_shutdown

from django_idempotency.maintenance.passes import (
    CLEANUP,
    DROP_BODIES,
    PASSES,
    REAP,
    Pass,
    run_pass,
)

PREFIX = "django_idempotency."


def beat_schedule(*passes: Pass) -> dict[str, dict[str, Any]]:
    """Return the entries for Celery beat that run ``passes``."""
    return {f"idempotency-{one.name.replace('_', '-')}": _entry(one) for one in passes}


def _entry(one: Pass) -> dict[str, Any]:
    limits = {
        "expires": one.expires,
        "soft_time_limit": round(0.9 * one.time_limit),
        "time_limit": one.time_limit,
    }
    bound = {} if one.max_seconds is None else {"max_seconds": one.max_seconds}
    return {
        "task": f"{PREFIX}{one.name}",
        "schedule": one.every,
        "kwargs": bound,
        "options": limits,
    }


BEAT_SCHEDULE = beat_schedule(REAP, CLEANUP)
# For projects that keep records for audit, but not their bodies.
BODIES_BEAT_SCHEDULE = beat_schedule(DROP_BODIES)


@beat_init.connect
def begin_at_once(sender: Any, **_named: Any) -> None:
    """Make tasks that beat has never run due at once.

    Otherwise a beat that restarts within each interval would never run them.
    """
    for entry in sender.scheduler.schedule.values():
        interval = getattr(entry.schedule, "run_every", None)
        if entry.task.startswith(PREFIX) and not entry.total_run_count and interval:
            entry.last_run_at = entry.schedule.now() - interval


# once, if both modules are imported
@worker_process_shutdown.connect(dispatch_uid="django_idempotency")
def stop_background(**_named: Any) -> None:
    """Write the counts that are still in memory: Python calls no exit handlers in a
    child of the prefork pool.
    """
    from django_idempotency.engine.background import background

    background.stop()


@PASSES.for_each
def _define(one: Pass) -> None:
    def task(**options: Any) -> dict[str, Any]:
        return run_pass(one.name, **options)

    shared_task(name=f"{PREFIX}{one.name}")(task)
