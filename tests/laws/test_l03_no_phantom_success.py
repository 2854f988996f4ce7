"""L3: no response is stored or sent for effects that did not commit."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction
from django.http import HttpResponse

from django_idempotency.models import Status
from testproject.models import LedgerEntry
from tests.support.callers import effects, entry_point, pay, paying, record
from tests.support.proxy import Cut
from tests.support.sql import run_sql
from tests.support.threads import in_threads
from tests.support.views_of_laws import BY_LOCK, postgresql
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


def paying_with_nobodys_money(request):
    """Its foreign key is deferred: it fails at COMMIT."""
    LedgerEntry.objects.create(
        kind="order", user_id=0, amount=5, currency="EUR", reference="r"
    )
    return HttpResponse(status=201)


@postgresql
@pytest.mark.parametrize("mode", ["atomic", BY_LOCK])
def test_l3_a_response_is_not_stored_if_a_constraint_fails_at_commit(mode):
    with pytest.raises(Exception, match="foreign key"):
        entry_point(paying_with_nobodys_money, mode=mode)()
    left = record()
    assert (
        left is None
        if mode != "atomic"
        else (left.status, left.response_status) == (Status.FAILED, None)
    )
    assert effects() == 0
    assert entry_point(paying, mode=mode)().status_code == 201
    assert effects() == 1


@postgresql
def test_l3_a_response_is_not_stored_after_a_serialization_failure_at_commit(
    monkeypatch,
):
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    connection.close()
    monkeypatch.setitem(
        connection.settings_dict,
        "OPTIONS",
        {"isolation_level": IsolationLevel.SERIALIZABLE},
    )

    def view(request):
        seen = effects()
        if seen == 0 and request.idempotency.attempt == 1:
            in_threads(1, write_what_was_read)
        return paying(request)

    def write_what_was_read(_index):
        with transaction.atomic():
            assert effects() == 0
            pay()

    with pytest.raises(OperationalError, match="serialize"):
        entry_point(view)()
    assert effects() == 1
    assert record().response_status is None
    assert entry_point(view)().status_code == 201
    assert effects() == 2
    connection.close()


@postgresql
# what the third and later ones say is prepared
@pytest.mark.parametrize("requests_before", [0, 6])
@pytest.mark.parametrize(
    "limit", ["idle_in_transaction_session_timeout", "transaction_timeout"]
)
def test_l3_the_response_of_a_view_over_its_time_limit_is_not_stored(
    limit, requests_before, other_thread
):
    """Before PostgreSQL 17 there is only the first of these limits."""

    def view(request):
        response = paying(request)
        if request.idempotency.attempt == 1:
            is_known = run_sql("SELECT 1 FROM pg_settings WHERE name = %s", [limit])
            known = limit if is_known else "idle_in_transaction_session_timeout"
            run_sql(f"SET LOCAL {known} = 1")
            backend = connection.connection.info.backend_pid
            eventually(lambda: other_thread(lambda: is_gone(backend)))
        return response

    for number in range(requests_before):
        assert entry_point(paying)(key=f"earlier-{number}").status_code == 201
    answer = entry_point(view)()
    assert (answer.status_code, effects(), record().response_status) == (
        503,
        requests_before,
        None,
    )
    assert entry_point(view)().status_code == 201
    assert effects() == requests_before + 1


def is_gone(backend):
    return not run_sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [backend])


@postgresql
def test_l3_a_connection_that_breaks_before_commit_is_a_failure(proxy):
    def view(request):
        proxy.cut = Cut.BEFORE_COMMIT
        return paying(request)

    answer = entry_point(view)()
    assert (answer.status_code, effects(), proxy.cuts) == (503, 0, 1)
    assert b'"safe_new_key": false' in answer.content
    assert entry_point(paying)().status_code == 201
    assert effects() == 1


def test_l3_a_2xx_from_a_transaction_marked_for_rollback_is_refused():
    def view(request):
        response = paying(request)
        transaction.set_rollback(request.idempotency.attempt == 1)
        return response

    with pytest.raises(
        transaction.TransactionManagementError, match="marked for rollback"
    ):
        entry_point(view)()
    assert (effects(), record().response_status) == (0, None)
    assert entry_point(view)().status_code == 201
    assert effects() == 1
