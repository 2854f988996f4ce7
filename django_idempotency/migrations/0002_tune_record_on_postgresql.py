"""Autovacuum parameters for PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

# Every record is updated once and deleted once, so the dead are as many as the living. The defaults wait for a fifth of
# the table; these keep each vacuum short however large the table is. No fillfactor: the completing update can't be HOT
# (its columns stand in index predicates), and at 100, 90, 70 and 50 it wrote the same WAL, to ever larger tables.
PARAMETERS = {
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.02,
    "autovacuum_vacuum_cost_delay": 0,
}


def tune(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    _alter(editor, "SET ({})", (f"{name} = {value}" for name, value in PARAMETERS.items()))


def reset(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    _alter(editor, "RESET ({})", PARAMETERS)


def _alter(editor: BaseDatabaseSchemaEditor, action: str, parameters: Iterable[str]) -> None:
    if editor.connection.vendor == "postgresql":
        editor.execute(f"ALTER TABLE django_idempotency_record {action.format(', '.join(parameters))}")


class Migration(migrations.Migration):
    dependencies = [("django_idempotency", "0001_create_record")]

    operations = [migrations.RunPython(tune, reset, elidable=False)]
