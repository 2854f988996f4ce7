"""Who holds a record in flight, as far as the database tells."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_idempotency import engine
from django_idempotency.maintenance.owners import owner_of, shown_owner
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RowLocked
from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import Keep, Operation, StoredResponse
from tests.admin.pages import page
from tests.support.threads import OtherThread
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")
ATOMIC = Policy()


def claimed():
    return engine.claim(Operation("user:1", "k", b"f" * 32, "POST", "/pay/"), ATOMIC)


def read():
    return IdempotencyRecord.objects.annotate(now=DatabaseNow(), locked=RowLocked()).get(key="k")


def run(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone() if cursor.description else None


@pytest.fixture
def owner():
    """A thread with a connection of its own that is at work on the key; the PID of its session."""
    thread = OtherThread()
    pid = thread(run, "SELECT pg_backend_pid()")[0]
    running = engine.execution(claimed(), ATOMIC)
    entered = thread(running.__enter__)
    try:
        yield pid
    finally:
        entered.verdict = Keep(StoredResponse(201))
        thread(running.__exit__, None, None, None)
        thread.close()


@pytest.mark.postgresql
def test_a_page_tells_which_session_has_the_row_locked(client, staff, owner):
    found = owner_of(read())
    assert (found.pid, found.state, found.user) == (owner, "idle in transaction", run("SELECT current_user")[0])
    assert 0 <= found.in_state <= found.transaction < 60
    shown = page(client, "k")
    assert f"PID {owner} of the database" in shown
    assert "idle in transaction for" in shown
    assert "its transaction began" in shown


@pytest.mark.postgresql
def test_the_command_shows_the_session_of_the_owner(capsys, owner):
    call_command("idempotency_keys", "show", "k")
    assert f"current owner   PID {owner} of the database" in capsys.readouterr().out


@pytest.mark.postgresql
def test_the_page_shows_the_lock_an_owner_waits_for(owner):
    holder, waiting = OtherThread(), OtherThread()
    pid = waiting(run, "SELECT pg_backend_pid()")[0]
    holder(run, "BEGIN")
    holder(run, "SELECT pg_advisory_xact_lock(4711)")
    waiting(run, "BEGIN")
    other = engine.claim(Operation("user:1", "other", b"f" * 32, "POST", "/pay/"), ATOMIC)
    waiting(run, f"SELECT 1 FROM django_idempotency_record WHERE id = '{other.id}' FOR UPDATE")
    blocked = waiting._pool.submit(run, "SELECT pg_advisory_xact_lock(4711)")
    record = IdempotencyRecord.objects.get(pk=other.id)
    try:
        found = eventually(lambda: (seen := owner_of(record)) and seen.waits_for and seen)
        assert (found.pid, found.waits_for) == (pid, "Lock: advisory")
    finally:
        holder(run, "ROLLBACK")
        blocked.result(10)
        waiting(run, "ROLLBACK")
        holder.close()
        waiting.close()


@pytest.mark.postgresql
def test_a_role_without_the_right_sees_the_session_alone(owner):
    record = read()
    with transaction.atomic():
        run("CREATE ROLE idempotency_clerk; GRANT SELECT ON django_idempotency_record TO idempotency_clerk")
        run("GRANT USAGE ON SCHEMA public TO idempotency_clerk; SET LOCAL ROLE idempotency_clerk")
        told = shown_owner(record)
        run("RESET ROLE")
        transaction.set_rollback(True)
    assert f"PID {owner} of the database" in told
    assert "hidden from this role" in told


@pytest.mark.postgresql
def test_without_any_right_the_page_says_that_it_does_not_know(owner):
    record = read()
    with transaction.atomic():
        run("CREATE ROLE idempotency_clerk; GRANT USAGE ON SCHEMA public TO idempotency_clerk")
        run("SET LOCAL ROLE idempotency_clerk")
        told = shown_owner(record)
        run("RESET ROLE")
        transaction.set_rollback(True)
    assert told == "A transaction has its row locked; the database does not show whose it is."


@pytest.mark.postgresql
def test_a_key_whose_owner_is_gone_is_held_by_nobody(client, staff):
    claimed()
    assert shown_owner(read()) == "Nobody: no transaction has its row locked."
    assert "current owner" in page(client, "k").lower()


@pytest.mark.postgresql
def test_a_lease_has_no_session():
    engine.claim(Operation("user:1", "k", b"f" * 32, "POST", "/pay/"), Policy(mode="lease"))
    assert shown_owner(read()).startswith("Not kept in lease mode")


@pytest.mark.other_databases
def test_a_database_that_can_not_show_owners_says_so(client, staff):
    claimed()
    assert "This database does not show it." in page(client, "k")


def test_an_ended_record_has_no_owner(client, staff):
    with engine.execution(claimed(), ATOMIC) as running:
        running.verdict = Keep(StoredResponse(201))
    assert shown_owner(read()) == ""
    assert "current owner" not in page(client, "k").lower()
