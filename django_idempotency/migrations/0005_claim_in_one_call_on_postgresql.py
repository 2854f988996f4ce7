"""The claim as a function of the database's, on PostgreSQL."""

from __future__ import annotations

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

from django_idempotency.stores.claim_function import FUNCTION


def create(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    if editor.connection.vendor == "postgresql":
        editor.execute(FUNCTION)


def drop(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    if editor.connection.vendor == "postgresql":
        editor.execute("DROP FUNCTION IF EXISTS django_idempotency_claim")


class Migration(migrations.Migration):
    dependencies = [("django_idempotency", "0004_create_tally")]

    operations = [migrations.RunPython(create, drop, elidable=False)]
