"""Connections that background threads have to themselves, whatever the project has set for its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from django_idempotency.stores.own_connections import own_connection
from testproject.models import LedgerEntry
from tests.support.callers import pay
from tests.support.maintained import run_sql
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

SCHEMA = 'Tenant "one'
QUOTED = SCHEMA.replace('"', '""')


def on_its_own(work, **options):
    try:
        with own_connection("default", seconds=30, **options):
            return work()
    finally:
        connections.close_all()


def value(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


@pytest.mark.parametrize(
    "options",
    [{"options": "-c lock_timeout=20ms"}, {"isolation_level": IsolationLevel.REPEATABLE_READ}],
    ids=["lock timeout", "isolation level"],
)
def test_a_write_waits_for_another_ones_row_whatever_the_project_has_set(monkeypatch, options, other_thread):
    pay()
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", connection.settings_dict["OPTIONS"] | options)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            LedgerEntry.objects.update(amount=6)
            write = pool.submit(on_its_own, lambda: LedgerEntry.objects.filter(amount__gt=0).update(amount=7))
            eventually(lambda: write.done() or other_thread(someone_waits_for_a_lock))
            time.sleep(0.1)
        assert write.result(30) == 1
    assert LedgerEntry.objects.get().amount == 7


def test_a_schema_may_have_any_name(other_thread):
    run_sql(f'CREATE SCHEMA "{QUOTED}"')
    try:
        found = other_thread(on_its_own, lambda: value("SELECT current_schemas(false)"), schemas=[SCHEMA])
    finally:
        run_sql(f'DROP SCHEMA "{QUOTED}"')
    assert found == [SCHEMA, "public"]
