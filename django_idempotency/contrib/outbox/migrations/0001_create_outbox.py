from __future__ import annotations

from django.db import migrations, models
from django.db.models import Q

from django_idempotency.extending.stores import DatabaseNow


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Relay",
            fields=[
                (
                    "id",
                    models.UUIDField(editable=False, primary_key=True, serialize=False),
                ),
                ("publisher", models.CharField(max_length=64)),
                ("lease_until", models.DateTimeField()),
            ],
            options={
                "db_table": "django_idempotency_outbox_relay",
            },
        ),
        migrations.CreateModel(
            name="Lane",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("publisher", models.CharField(max_length=64)),
                ("number", models.SmallIntegerField()),
                ("relay_id", models.UUIDField(null=True)),
            ],
            options={
                "db_table": "django_idempotency_outbox_lane",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("publisher", "number"), name="outbox_lane_number"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "event_id",
                    models.UUIDField(
                        editable=False, unique=True, verbose_name="event id"
                    ),
                ),
                (
                    "publisher",
                    models.CharField(max_length=64, verbose_name="publisher"),
                ),
                ("lane", models.SmallIntegerField(verbose_name="lane")),
                ("topic", models.CharField(max_length=255, verbose_name="topic")),
                (
                    "key",
                    models.CharField(blank=True, max_length=255, verbose_name="key"),
                ),
                ("payload", models.BinaryField(verbose_name="payload")),
                (
                    "content_type",
                    models.CharField(max_length=255, verbose_name="content type"),
                ),
                ("headers", models.JSONField(default=dict, verbose_name="headers")),
                (
                    "status",
                    models.CharField(
                        choices=[("pending", "pending"), ("dead", "dead letter")],
                        default="pending",
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                (
                    "attempts",
                    models.PositiveIntegerField(
                        default=0, verbose_name="failed attempts"
                    ),
                ),
                ("error", models.TextField(blank=True, verbose_name="last error")),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=DatabaseNow(), verbose_name="created at"
                    ),
                ),
                (
                    "available_at",
                    models.DateTimeField(null=True, verbose_name="next attempt at"),
                ),
                (
                    "given_up_at",
                    models.DateTimeField(null=True, verbose_name="given up at"),
                ),
            ],
            options={
                "verbose_name": "outbox event",
                "verbose_name_plural": "outbox events",
                "db_table": "django_idempotency_outbox_event",
                "indexes": [
                    models.Index(
                        "publisher",
                        "lane",
                        "id",
                        name="outbox_event_pending",
                        condition=Q(status="pending", attempts=0),
                    ),
                    models.Index(
                        "publisher",
                        "lane",
                        "available_at",
                        name="outbox_event_due",
                        condition=Q(status="pending", attempts__gt=0),
                    ),
                    models.Index(
                        "publisher",
                        "lane",
                        "key",
                        "id",
                        name="outbox_event_failed",
                        condition=Q(attempts__gt=0, status__in=["pending", "dead"])
                        & ~Q(key=""),
                    ),
                    models.Index(
                        "publisher",
                        "status",
                        "lane",
                        "id",
                        name="outbox_event_tried",
                        condition=Q(attempts__gte=1, status__in=["pending", "dead"]),
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(status__in=["pending", "dead"]),
                        name="outbox_event_status",
                    ),
                    models.CheckConstraint(
                        condition=Q(lane__range=(0, 63)), name="outbox_event_lane"
                    ),
                    models.CheckConstraint(
                        condition=Q(status="pending", given_up_at__isnull=True)
                        | Q(status="dead", given_up_at__isnull=False),
                        name="outbox_event_given_up_at",
                    ),
                ],
            },
        ),
    ]
