"""What a child of Celery's prefork pool does when it ends. Imported by what its workers import, and in settings."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_process_shutdown


@worker_process_shutdown.connect
def end(**_named: Any) -> None:
    """Write what was counted: Python's exit handlers are not called in such a child."""
    from django_idempotency.engine.background import background

    background.end()
