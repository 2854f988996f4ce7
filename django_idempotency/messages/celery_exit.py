"""What a child of Celery's prefork pool does when it ends. Imported by modules that workers or settings import."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_process_shutdown


@worker_process_shutdown.connect
def end(**_named: Any) -> None:
    """Write the counts that are still in memory: Python doesn't call exit handlers in such a child."""
    from django_idempotency.engine.background import background

    background.end()
