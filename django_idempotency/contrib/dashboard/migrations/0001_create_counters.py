from __future__ import annotations

from typing import Any

from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps


def compare_exactly(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    """Compare text by the byte on MariaDB and MySQL, as other databases do."""
    connection: Any = editor.connection
    if connection.vendor == "mysql":
        collation = (
            "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        )
        editor.execute(
            f"ALTER TABLE django_idempotency_counter"
            f" CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        )


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="IdempotencyCounter",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "since",
                        "view",
                        "event",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("since", models.DateTimeField()),
                ("view", models.CharField(max_length=200)),
                ("event", models.CharField(max_length=32)),
                ("count", models.BigIntegerField()),
            ],
            options={
                "db_table": "django_idempotency_counter",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="IdempotencyObservation",
            fields=[
                (
                    "digest",
                    models.UUIDField(editable=False, primary_key=True, serialize=False),
                ),
                ("seen_at", models.DateTimeField()),
                ("found", models.IntegerField()),
            ],
            options={
                "db_table": "django_idempotency_observation",
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        fields=["seen_at"], name="idempotency_observation_seen"
                    )
                ],
            },
        ),
        # MariaDB and MySQL can take no DDL back.
        migrations.RunPython(compare_exactly, migrations.RunPython.noop, atomic=False),
    ]
