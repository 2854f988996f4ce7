"""The release before a migration goes on after it, on connections that have prepared
its statements.

The migrations here are made up: they follow the rule of docs/upgrading.md, or break it.
"""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, transaction

from django_idempotency.stores.claim_function import FUNCTION
from tests.support.callers import effects, entry_point, paying
from tests.support.sql import run_sql

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.plain_table,
    pytest.mark.usefixtures("payer"),
]

TABLE = "django_idempotency_record"
NEW_COLUMN = f"ALTER TABLE {TABLE} ADD COLUMN region text NOT NULL DEFAULT 'north'"
WIDER = f"ALTER TABLE {TABLE} ALTER COLUMN attempts TYPE bigint"
# The function of the release before returns what it did; the new release has one of its
# own.
CAST = FUNCTION.replace("old.attempts,", "old.attempts::integer,")
NEW_FUNCTION = FUNCTION.replace(
    "django_idempotency_claim(", "django_idempotency_claim_2("
).replace("attempts integer", "attempts bigint")
DROP_NEW_FUNCTION = "DROP FUNCTION IF EXISTS django_idempotency_claim_2"


def migrate(*statements):
    with transaction.atomic():
        for statement in statements:
            run_sql(statement)


@pytest.fixture
def migrated(other_thread):
    """Run a migration in a session of its own; it is taken back at the end."""
    yield lambda *statements: other_thread(migrate, *statements)
    back = (
        f"ALTER TABLE {TABLE} DROP COLUMN IF EXISTS region",
        f"ALTER TABLE {TABLE} ALTER COLUMN attempts TYPE integer",
    )
    other_thread(migrate, *back, FUNCTION, DROP_NEW_FUNCTION)
    connection.close()


@pytest.fixture
def pay():
    """The entry point, on a connection that has prepared its statements and the plans
    of the claim's function.
    """
    pay = entry_point(paying, mode="atomic")
    for key in ("one", "two", "three", "three", "two"):
        assert pay(key).status_code == 201
    assert len(run_sql("SELECT name FROM pg_prepared_statements")) >= 3
    return pay


@pytest.mark.parametrize(
    "statements",
    [(NEW_COLUMN,), (WIDER, CAST, NEW_FUNCTION)],
    ids=["new-column", "wider-column"],
)
def test_the_release_before_goes_on_after_a_migration(migrated, pay, statements):
    first, session = pay("one"), connection.connection
    migrated(*statements)
    again = pay("one")
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert pay("four").status_code == pay("four").status_code == 201
    assert effects() == 4
    assert connection.connection is session


def test_a_wider_column_without_the_cast_would_break_replays(migrated, pay):
    migrated(WIDER)
    assert pay("four").status_code == 201
    with pytest.raises(DatabaseError, match="bigint"):
        pay("one")
