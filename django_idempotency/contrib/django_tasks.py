"""Maintenance as a task of Django's own framework (Django 6.0 and later)."""

from __future__ import annotations

from typing import Any

from django.tasks import task

from django_idempotency.extending.operators import run_pass as run


@task()
def run_pass(name: str, **options: Any) -> dict[str, Any]:
    """Run the pass ``name``, such as ``reap``. Schedule ``run_pass.enqueue("reap")``
    with any tool.
    """
    return run(name, **options)
