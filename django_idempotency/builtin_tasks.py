"""Maintenance as tasks of Django's own framework (Django 6.0 and later): ``reap.enqueue()``, by whatever schedules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.tasks import task

from django_idempotency import maintenance, partitions


@task()
def reap(**options: Any) -> dict[str, Any]:
    """``maintenance.reap``, with its options."""
    return asdict(maintenance.reap(**options))


@task()
def cleanup(**options: Any) -> dict[str, Any]:
    """``maintenance.cleanup``, with its options."""
    return asdict(maintenance.cleanup(**options))


@task()
def drop_bodies(**options: Any) -> dict[str, Any]:
    """``maintenance.drop_bodies``, with its options."""
    return asdict(maintenance.drop_bodies(**options))


@task()
def ensure_partitions(**options: Any) -> dict[str, Any]:
    """``partitions.ensure``, with its options."""
    return asdict(partitions.ensure(**options))


@task()
def drop_partitions(**options: Any) -> dict[str, Any]:
    """``partitions.drop``, with its options."""
    return asdict(partitions.drop(**options))
