"""The maintenance passes as jobs for a task queue. They take options and return figures, both as plain values.

Without ``using``, a job works on each database with records in turn. If there are several, it returns the figures of
each by its alias. If one database fails, the others are worked on all the same, and the error is raised at the end.

Settings may import this module before models are loaded, so imports that need models are inside the functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any


def _on_each(run: Callable[..., Any], *, using: str | None = None, **options: Any) -> dict[str, Any]:
    from django_idempotency.stores.connections import databases

    wanted = databases() if using is None else (using,)
    if len(wanted) == 1:
        return asdict(run(using=wanted[0], **options))
    ends = time.monotonic() + (options.get("max_seconds") or 0.0)
    figures: dict[str, Any] = {}
    errors: list[Exception] = []
    for place, alias in enumerate(wanted):
        if options.get("max_seconds") is not None:  # share the remaining time among the remaining databases
            options["max_seconds"] = max(0.0, ends - time.monotonic()) / (len(wanted) - place)
        try:
            figures[alias] = asdict(run(using=alias, **options))
        except Exception as error:
            error.add_note(f"in the database {alias!r}")
            errors.append(error)
    if errors:
        raise ExceptionGroup("maintenance failed in some databases", errors)
    return figures


def reap(**options: Any) -> dict[str, Any]:
    """Run ``maintenance.reap`` with its options; return its figures."""
    from django_idempotency import maintenance

    return _on_each(maintenance.reap, **options)


def cleanup(**options: Any) -> dict[str, Any]:
    """Run ``maintenance.cleanup`` with its options; return its figures."""
    from django_idempotency import maintenance

    return _on_each(maintenance.cleanup, **options)


def drop_bodies(**options: Any) -> dict[str, Any]:
    """Run ``maintenance.drop_bodies`` with its options; return its figures."""
    from django_idempotency import maintenance

    return _on_each(maintenance.drop_bodies, **options)


def ensure_partitions(**options: Any) -> dict[str, Any]:
    """Run ``partitions.ensure`` with its options; return what it made."""
    from django_idempotency import partitions

    return _on_each(partitions.ensure, **options)


def drop_partitions(**options: Any) -> dict[str, Any]:
    """Run ``partitions.drop`` with its options; return what it dropped."""
    from django_idempotency import partitions

    return _on_each(partitions.drop, **options)
