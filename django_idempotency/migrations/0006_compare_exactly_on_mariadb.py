"""Compare text by the byte on MariaDB and MySQL, as other databases do: their default is case-insensitive."""

from __future__ import annotations

from typing import Any

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

TABLES = ("django_idempotency_record", "django_idempotency_counter")


def compare_exactly(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    connection: Any = editor.connection
    if connection.vendor == "mysql":
        collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        for table in TABLES:
            editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}")


class Migration(migrations.Migration):
    dependencies = [("django_idempotency", "0005_claim_in_one_call_on_postgresql")]

    # Not atomic: MariaDB and MySQL can take no DDL back.
    operations = [migrations.RunPython(compare_exactly, migrations.RunPython.noop, atomic=False)]
