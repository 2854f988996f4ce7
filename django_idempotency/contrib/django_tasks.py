"""Maintenance as tasks of Django's own framework (Django 6.0 and later). Schedule ``reap.enqueue()`` with any tool.

A worker finds a task by the module and name of its function, so each task is a function in this module.
"""

from __future__ import annotations

from typing import Any

from django.tasks import task

from django_idempotency import jobs


@task()
def reap(**options: Any) -> dict[str, Any]:
    return jobs.reap(**options)


@task()
def cleanup(**options: Any) -> dict[str, Any]:
    return jobs.cleanup(**options)


@task()
def drop_bodies(**options: Any) -> dict[str, Any]:
    return jobs.drop_bodies(**options)


@task()
def ensure_partitions(**options: Any) -> dict[str, Any]:
    return jobs.ensure_partitions(**options)


@task()
def drop_partitions(**options: Any) -> dict[str, Any]:
    return jobs.drop_partitions(**options)
