"""Run system checks by their ids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from django.core.checks import CheckMessage

from django_idempotency.checks import Project
from django_idempotency.checks.registry import registered, run

CORE = "django_idempotency"
CITUS, OUTBOX, PARTITIONS = (
    f"{CORE}_{wing}" for wing in ("citus", "outbox", "partitions")
)


def found(
    *ids: str, label: str = CORE, databases: Collection[str] = ("default",)
) -> list[CheckMessage]:
    """What the checks with these ids find, or all checks of the app ``label``,
    deployment checks included.
    """
    table = registered[label]
    rows = [row for row in table.rows if row.id in ids or not ids]
    assert {row.id for row in rows} >= set(ids)
    return run(replace(table, rows=rows), Project(databases))


def ids_found(
    *ids: str, label: str = CORE, databases: Collection[str] = ("default",)
) -> list[str]:
    return [
        message.id.rpartition(".")[2]
        for message in found(*ids, label=label, databases=databases)
    ]
