from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Entry",
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
                ("action_time", models.DateTimeField(verbose_name="when")),
                ("user", models.CharField(max_length=254, verbose_name="who")),
                (
                    "user_id",
                    models.CharField(max_length=64, verbose_name="id of the user"),
                ),
                ("model", models.CharField(max_length=100, verbose_name="kind")),
                (
                    "object_id",
                    models.CharField(db_index=True, max_length=36, verbose_name="id"),
                ),
                ("object_repr", models.CharField(max_length=200, verbose_name="name")),
                ("change_message", models.TextField(verbose_name="what")),
            ],
            options={
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit entries",
                "db_table": "django_idempotency_audit",
                "default_permissions": ("view",),
            },
        ),
    ]
