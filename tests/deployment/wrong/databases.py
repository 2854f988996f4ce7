from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from django.core import mail
from django.db import connection, transaction

from django_idempotency.checks.subjects import TABLE
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.policy import Policy
from tests.deployment.wrong import wrong
from tests.stores.memory import MemoryStore
from tests.support.callers import claim, entry_point, paying, shift

postgresql = pytest.mark.postgresql
HOUR, DAY = 3600, 24 * 3600
MEMORY = {"memory": {"BACKEND": "tests.stores.memory.MemoryStore"}}


CLERK = (
    "CREATE ROLE idempotency_clerk",
    "GRANT USAGE ON SCHEMA public TO idempotency_clerk",
)


@contextmanager
def undone():
    with transaction.atomic():
        try:
            yield
        finally:
            transaction.set_rollback(True)


@wrong(
    "E025", "The idempotency records are in SQLite (database 'lite'), and DEBUG is off."
)
def sqlite_in_production(project):
    project(USING=project.second_database())
    project.settings.DEBUG = False
    project.patch.delattr(mail, "outbox")
    yield
    project.settings.DEBUG = True


@wrong(
    "E027",
    "The database 'default' has no table for the idempotency records.",
    postgresql,
)
def no_table(project):
    with undone():
        project.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
        yield
        project.execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")
        yield


@wrong(
    "E028",
    "can't UPDATE, DELETE the idempotency records in 'default': permission denied",
    postgresql,
)
def lacking_privileges(project):
    with undone():
        project.execute(
            *CLERK,
            f"GRANT SELECT, INSERT ON {TABLE} TO idempotency_clerk; SET LOCAL ROLE"
            " idempotency_clerk",
        )
        yield
        project.execute(
            "RESET ROLE",
            f"GRANT ALL ON {TABLE} TO idempotency_clerk; SET LOCAL ROLE"
            " idempotency_clerk",
        )
        yield


@wrong(
    "W029",
    "The database 'default' has the table of the idempotency records, but no claim"
    " function",
    postgresql,
)
def no_claim_function(project):
    function = "FUNCTION django_idempotency_claim"
    with undone():
        project.execute(
            *CLERK,
            f"REVOKE EXECUTE ON {function} FROM PUBLIC; SET LOCAL ROLE"
            " idempotency_clerk",
        )
        yield
        project.execute(
            "RESET ROLE",
            f"GRANT EXECUTE ON {function} TO PUBLIC; SET LOCAL ROLE idempotency_clerk",
        )
        yield


@wrong(
    "E031",
    "does not support SELECT … FOR UPDATE with SKIP LOCKED and NOWAIT.",
    pytest.mark.row_locks,
)
def no_skip_locked(project, lacking="skip_locked"):
    project.patch.setattr(
        connection.features, f"has_select_for_update_{lacking}", False
    )
    yield
    project.patch.undo()


@wrong(
    "E031",
    "does not support SELECT … FOR UPDATE with SKIP LOCKED and NOWAIT.",
    pytest.mark.row_locks,
)
def no_nowait(project):
    return no_skip_locked(project, "nowait")


@wrong("W033", "The store 'memory' can't be reached: it is away")
def an_unreachable_store(project):
    def objections(self):
        raise StoreUnavailable("it is away")

    project(STORES=MEMORY, STORE="memory", MODE="lease")
    project.patch.setattr(MemoryStore, "objections", objections)
    yield
    project.patch.undo()


@wrong("E034", "It forgets everything.")
def a_store_that_is_unfit(project):
    project(STORES=MEMORY, STORE="memory", MODE="lease")
    project.patch.setattr(
        MemoryStore, "objections", lambda self: ["It forgets everything."]
    )
    yield
    project.patch.undo()


@wrong(
    "W035",
    "Records in the database 'default' have been due for deletion for more than a day",
)
def no_cleanup(project):
    entry_point(paying, mode="lease")()
    shift(expires_at=-2 * DAY, purge_at=-DAY - HOUR)
    yield
    shift(purge_at=-DAY + HOUR)


@wrong(
    "W035",
    "The owners of keys in the database 'default' have been gone for more than an hour",
)
def no_reaper(project):
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-HOUR - 60)
    yield
    shift(locked_until=-HOUR + 60)


@wrong("W030", "in the database 'default' is UNLOGGED", postgresql)
def an_unlogged_table(project):
    with undone():
        project.execute(f"ALTER TABLE {TABLE} SET UNLOGGED")
        yield
        project.execute(f"ALTER TABLE {TABLE} SET LOGGED")
        yield


@wrong(
    "W032",
    "is read with psycopg2, USE_TZ is off, and Europe/Berlin has daylight saving",
)
def times_without_a_zone(project):
    project.settings.USE_TZ, project.settings.TIME_ZONE = False, "Europe/Berlin"
    psycopg2 = SimpleNamespace(__name__="psycopg2")
    project.patch.setattr(connection, "Database", psycopg2, raising=False)
    yield
    project.settings.TIME_ZONE = "Asia/Kathmandu"
