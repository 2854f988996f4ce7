"""System checks of steps, described in ``docs/steps.md``."""

from __future__ import annotations

from django_idempotency.contrib.steps.models import Step
from django_idempotency.extending.operators import Check, Database, each, is_sharded


def unfit(database: Database) -> bool:
    return database.vendor != "postgresql" or is_sharded(database.using)


CHECKS = (
    Check(
        "W001",
        each("migrated", unfit),
        "Steps can't be used with records in the database {it}: only PostgreSQL,"
        " without Citus, can fence a step's effects.",
        "Keep the records of operations with steps in PostgreSQL, or remove"
        " django_idempotency.contrib.steps from INSTALLED_APPS.",
        database=True,
    ),
    Check(
        "E001",
        each("migrated", lambda database: database.lacks(Step)),
        "The database {it} has records, but no table for their steps.",
        "Run manage.py migrate --database {it.using}.",
        database=True,
        deploy=True,
    ),
)
