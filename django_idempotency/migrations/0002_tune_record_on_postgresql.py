"""Storage and autovacuum parameters for PostgreSQL; see docs/internals.md for the figures behind them."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

# Every record is updated once, when it completes, and deleted once. Room on its own page keeps the update's WAL short:
# PostgreSQL then logs only what changed. A fixed threshold keeps vacuum short and often as the table grows.
PARAMETERS = {
    "fillfactor": 50,
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
