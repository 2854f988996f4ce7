"""The table; on PostgreSQL also the function that claims, and autovacuum's
parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

# Every record is updated once and deleted once, so the dead are as many as the living,
# and the default would wait for a fifth of the table. The completing update can't be
# HOT, because its columns are part of index predicates, so a fillfactor would gain
# nothing. docs/retention.md has the figures.
PARAMETERS = {"autovacuum_vacuum_scale_factor": 0.01}
FUNCTION = (Path(__file__).parents[1] / "stores" / "sql" / "claim.sql").read_text()


def complete(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    connection: Any = editor.connection
    if connection.vendor == "postgresql":
        parameters = ", ".join(
            f"{name} = {value}" for name, value in PARAMETERS.items()
        )
        editor.execute(f"ALTER TABLE django_idempotency_record SET ({parameters})")
        editor.execute(FUNCTION)
    elif (
        connection.vendor == "mysql"
    ):  # it would compare text without regard to case; others compare it by the byte
        collation = (
            "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        )
        editor.execute(
            f"ALTER TABLE django_idempotency_record"
            f" CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        )


def drop(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    if editor.connection.vendor == "postgresql":
        editor.execute("DROP FUNCTION IF EXISTS django_idempotency_claim")


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="IdempotencyRecord",
            fields=[
                (
                    "id",
                    models.UUIDField(editable=False, primary_key=True, serialize=False),
                ),
                ("scope", models.TextField(verbose_name="scope")),
                ("key", models.CharField(max_length=255, verbose_name="key")),
                ("method", models.CharField(max_length=32, verbose_name="method")),
                ("path", models.TextField(verbose_name="path")),
                (
                    "fingerprint",
                    models.BinaryField(max_length=36, verbose_name="fingerprint"),
                ),
                (
                    "mode",
                    models.CharField(
                        choices=[("atomic", "atomic"), ("lease", "lease")],
                        max_length=16,
                        verbose_name="mode",
                    ),
                ),
                (
                    "hold_on_crash",
                    models.BooleanField(db_default=False, verbose_name="hold on crash"),
                ),
                ("created_at", models.DateTimeField(verbose_name="created at")),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("started", "started"),
                            ("processing", "processing"),
                            ("completed", "completed"),
                            ("failed", "failed"),
                        ],
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                (
                    "attempts",
                    models.IntegerField(db_default=1, verbose_name="attempts"),
                ),
                (
                    "on_hold",
                    models.BooleanField(db_default=False, verbose_name="on hold"),
                ),
                ("reason", models.TextField(db_default="", verbose_name="reason")),
                ("token", models.UUIDField(null=True, verbose_name="fencing token")),
                (
                    "locked_at",
                    models.DateTimeField(null=True, verbose_name="locked at"),
                ),
                (
                    "locked_until",
                    models.DateTimeField(null=True, verbose_name="locked until"),
                ),
                ("updated_at", models.DateTimeField(verbose_name="updated at")),
                ("expires_at", models.DateTimeField(verbose_name="expires at")),
                ("purge_at", models.DateTimeField(verbose_name="purge at")),
                (
                    "replays",
                    models.BigIntegerField(db_default=0, verbose_name="replays"),
                ),
                (
                    "last_replayed_at",
                    models.DateTimeField(null=True, verbose_name="last replayed at"),
                ),
                (
                    "response_status",
                    models.SmallIntegerField(null=True, verbose_name="response status"),
                ),
                (
                    "response_headers",
                    models.JSONField(null=True, verbose_name="response headers"),
                ),
                (
                    "response_body",
                    models.BinaryField(null=True, verbose_name="response body"),
                ),
            ],
            options={
                "verbose_name": "idempotency record",
                "verbose_name_plural": "idempotency records",
                "db_table": "django_idempotency_record",
                "permissions": [
                    (
                        "view_response_idempotencyrecord",
                        "Can view the stored response body",
                    ),
                    ("allow_retry_idempotencyrecord", "Can allow a key to be retried"),
                    ("fail_idempotencyrecord", "Can mark a key as failed for good"),
                    (
                        "resolve_idempotencyrecord",
                        "Can resolve a key on hold with a response",
                    ),
                    ("extend_idempotencyrecord", "Can extend the lease of a key"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(
                            ("status__in", ("started", "processing")),
                            ("on_hold", True),
                            _connector="OR",
                        ),
                        fields=["locked_until"],
                        name="idempotency_record_reap",
                    ),
                    models.Index(
                        condition=models.Q(("status__in", ("completed", "failed"))),
                        fields=["purge_at"],
                        name="idempotency_record_purge",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("purge_at__gt", models.F("expires_at")),
                            ("response_body__isnull", False),
                        ),
                        fields=["expires_at"],
                        name="idempotency_record_bodies",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("response_status__isnull", True), ("status", "failed")
                        ),
                        fields=["on_hold", "updated_at"],
                        name="idempotency_record_undecided",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "status__in",
                                ["started", "processing", "completed", "failed"],
                            )
                        ),
                        name="idempotency_record_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("mode__in", ["atomic", "lease"])),
                        name="idempotency_record_mode",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("status__in", ("started", "processing")),
                                ("locked_at__isnull", False),
                                ("locked_until__isnull", False),
                                ("token__isnull", False),
                            ),
                            models.Q(
                                models.Q(
                                    ("status__in", ("started", "processing")),
                                    _negated=True,
                                ),
                                ("locked_at__isnull", True),
                                ("locked_until__isnull", True),
                                ("token__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="idempotency_record_claim",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("response_headers__isnull", False),
                                ("response_status__isnull", False),
                                ("status__in", ("completed", "failed")),
                            ),
                            models.Q(
                                ("response_body__isnull", True),
                                ("response_headers__isnull", True),
                                ("response_status__isnull", True),
                                ("status__in", ["started", "processing", "failed"]),
                            ),
                            _connector="OR",
                        ),
                        name="idempotency_record_response",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("on_hold", False),
                            models.Q(
                                ("response_status__isnull", True), ("status", "failed")
                            ),
                            _connector="OR",
                        ),
                        name="idempotency_record_on_hold",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 1),
                            ("purge_at__gte", models.F("expires_at")),
                        ),
                        name="idempotency_record_sane",
                    ),
                ],
            },
        ),
        # Not atomic: MariaDB and MySQL can take no DDL back.
        migrations.RunPython(complete, drop, atomic=False, elidable=False),
    ]
