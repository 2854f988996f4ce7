"""Of several runs that hang, each leads to its own session of the database."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from django.contrib import admin
from django.core.management import CommandError
from django.db import transaction
from django.urls import path

from django_idempotency.maintenance.sessions import session_of, sessions_by_lock
from django_idempotency.models import IdempotencyRecord, RowLocked
from django_idempotency.values.keys import record_id
from django_idempotency.values.policy import Atomic, Policy
from tests.admin.pages import page
from tests.support.callers import SCOPE, Gate, claim
from tests.support.commands import told
from tests.support.sql import run_sql, value_of

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer"),
]

KEYS = ("a", "b", "c", "d")


def hang(processes, key, mode):
    """The view of ``key`` runs until the block is left, in a session of its own."""

    def note():
        processes[key] = value_of(
            "SELECT pg_backend_pid(), set_config('application_name', %s, false)",
            [f"worker of {key}"],
        )

    return Gate(note).running_with(key, mode=mode)


@pytest.fixture(params=["record", "lock"])
def hanging(request):
    """The process of the session of each of ``KEYS``."""
    processes = {}
    with ExitStack() as stack:
        for key in KEYS:
            stack.enter_context(hang(processes, key, Atomic(claim=request.param)))
        yield processes


def session(key, *arguments):
    (shown,) = told("idempotency_keys", "show", key, *arguments)
    return shown["session"]


def test_each_of_several_keys_that_hang_leads_to_its_own_session(hanging):
    for key in KEYS:
        found = session(key)
        assert (found["process"], found["application"], found["state"]) == (
            hanging[key],
            f"worker of {key}",
            "idle in transaction",
        )
        assert 0 <= found["seconds"] < 600
        by_scope = session(key, f"--scope={SCOPE}")
        assert by_scope["process"] == hanging[key]
    with pytest.raises(CommandError, match=r"Unknown key|not in that scope"):
        session("a", "--scope=user:9")


@pytest.mark.parametrize("hanging", ["lock"], indirect=True)
def test_a_decision_about_a_key_without_a_record_names_its_session(hanging, admin_user):
    process = hanging["c"]
    with pytest.raises(CommandError, match=f"Nothing was done.* process {process}, "):
        told("idempotency_keys", "allow-retry", "c", "--by=admin")


def test_the_page_of_a_record_names_the_session(admin_client, settings):
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    processes = {}
    with hang(processes, "a", Atomic()), hang(processes, "b", Atomic()):
        shown = page(admin_client, "b", SCOPE)
        assert f"process {processes['b']}, " in shown
        assert "application worker of b" in shown
        assert f"process {processes['a']}, " not in shown
    assert "Row locked by" not in page(admin_client, "b", SCOPE)


def read(key):
    rows = IdempotencyRecord.objects.annotate(locked=RowLocked())
    return rows.get(pk=record_id(SCOPE, key))


def test_a_row_locked_in_a_savepoint_leads_to_the_session_too(other_thread):
    """Its number is that of the savepoint, which ``backend_xid`` is not."""
    claim("k", policy=Policy(scope=SCOPE))
    assert session_of(read("k")) is None
    other_thread(run_sql, "BEGIN")
    other_thread(run_sql, "CREATE TEMPORARY TABLE numbered () ON COMMIT DROP")
    other_thread(run_sql, "SAVEPOINT inner_one")
    other_thread(run_sql, "SELECT FROM django_idempotency_record FOR UPDATE")
    try:
        assert session_of(read("k")).process == other_thread(process)
    finally:
        other_thread(run_sql, "ROLLBACK")


def process():
    return value_of("SELECT pg_backend_pid()")


def test_a_role_without_rights_sees_the_process_and_not_its_host_and_start(hanging):
    id = record_id(SCOPE, "a")

    def found():
        return next(iter(sessions_by_lock("default", id=id)), None) or session_of(
            read("a")
        )

    with transaction.atomic():
        run_sql("CREATE ROLE idempotency_clerk")
        run_sql("GRANT USAGE ON SCHEMA public TO idempotency_clerk")
        run_sql("GRANT SELECT ON django_idempotency_record TO idempotency_clerk")
        run_sql("SET LOCAL ROLE idempotency_clerk")
        seen = found()
        hidden = {"client": "", "since": None, "seconds": None, "state": None}
        assert seen == replace(seen, process=hanging["a"], **hidden)
        assert "application worker of a, host and start are shown to pg_read" in str(
            seen
        )
        run_sql("RESET ROLE")
        run_sql("GRANT pg_read_all_stats TO idempotency_clerk")
        run_sql("SET LOCAL ROLE idempotency_clerk")
        assert found().state == "idle in transaction"
        run_sql("RESET ROLE")
        transaction.set_rollback(True)
