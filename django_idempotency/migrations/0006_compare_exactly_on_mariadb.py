"""Text that is equal to the byte alone is equal, on MariaDB as elsewhere: its default compares case-insensitively."""

from __future__ import annotations

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

TABLES = ("django_idempotency_record", "django_idempotency_counter")


def compare_exactly(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    if getattr(editor.connection, "mysql_is_mariadb", False):
        for table in TABLES:
            editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")


class Migration(migrations.Migration):
    dependencies = [("django_idempotency", "0005_claim_in_one_call_on_postgresql")]

    # Not atomic: MariaDB can take no DDL back.
    operations = [migrations.RunPython(compare_exactly, migrations.RunPython.noop, atomic=False)]
