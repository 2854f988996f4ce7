"""Autovacuum parameters for PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

# Every record is updated once and deleted once, so the dead are as many as the living. The default waits for a fifth of
# the table: after ten days that was then 16 % larger, and a key wrote 26 % more WAL, than with this, which makes a
# vacuum for about each run of the clean-up. Nothing else pays. The dead come as fast as the new, so the threshold for
# inserts never decides; no statement's plan hangs on fresh statistics; and autovacuum's usual pace keeps up with a
# hundred million keys a day. A fillfactor of 80 saves a fifth of the WAL where responses are of 200 bytes, and none
# where they are of 1,000, for a table that is 17 or 38 % larger: the completing update can't be HOT, as its columns are
# part of index predicates. The figures: docs/retention.md.
PARAMETERS = {"autovacuum_vacuum_scale_factor": 0.01}


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
