"""A crash at any point of a deferred operation: each effect is there once."""

from __future__ import annotations

import pytest
from django.db import connection

from django_idempotency.contrib.operations import run_operation
from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.messages import InFlightElsewhere
from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry
from tests.contrib.operations.worker import KINDS, POINTS, request, run_due, working
from tests.support.callers import effects
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.slow]

# --- At each point --------------------------------------------------------------------


def end_sessions(only=""):
    """End all others' sessions, or one of them, as an administrator or a failover
    does.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
            " WHERE pid IN (SELECT pid FROM pg_stat_activity WHERE backend_type ="
            " 'client backend' AND datname = current_database() AND pid <>"
            f" pg_backend_pid() ORDER BY random() {only})"
        )
        return cursor.fetchone()[0]


def own_records():
    return IdempotencyRecord.objects.filter(key__startswith="deferred:")


def finished(kind):
    """The response of a retry, once a worker has done all that is due."""

    def retried():
        # as if the minute was over, and a lease had lapsed
        DeferredOperation.objects.exclude(due_at=None).update(
            due_at="2020-01-01T00:00Z"
        )
        own_records().exclude(token=None).update(
            locked_at="2020-01-01T00:00Z", locked_until="2020-01-01T00:00Z"
        )
        run_due()
        response = request(kind)
        return response if response.status_code == 201 else None

    return eventually(retried)


def assert_done_once(kind):
    response = finished(kind)
    entry = LedgerEntry.objects.get()
    assert response.content.decode() == f'"{entry.pk.hex}"'
    assert not DeferredOperation.objects.exclude(due_at=None).exists()
    for _time in range(2):
        run_due()
    assert effects() == 1


KIND = pytest.mark.parametrize("kind", KINDS)
POINT = pytest.mark.parametrize("point", POINTS)


@KIND
@POINT
def test_a_worker_is_killed(point, kind, payer):
    assert request(kind).status_code == 202
    with working(point, kind) as worker:
        worker.kill()
    assert_done_once(kind)


@KIND
@POINT
def test_the_database_ends_the_worker_s_session(point, kind, payer):
    assert request(kind).status_code == 202
    with working(point, kind) as worker:
        end_sessions()
        worker.go_on()
        worker.says()
    assert_done_once(kind)


@KIND
@pytest.mark.parametrize("point", POINTS[:-1])
def test_a_worker_is_told_of_what_another_one_runs(point, kind, payer):
    """As by a second hint: the claim alone decides."""
    assert request(kind).status_code == 202
    deferred = DeferredOperation.objects.get()
    with working(point, kind) as worker:
        refused = run_operation(deferred.pk, using="default")
        assert isinstance(refused, InFlightElsewhere)
        worker.go_on()
        assert worker.says() == ["Done"]
    assert effects() == 1
    assert_done_once(kind)


def test_a_request_that_is_killed_before_its_202_has_deferred_nothing(payer):
    (kind, _other) = KINDS
    with working("deferred", kind) as server:
        assert run_due() == []
        server.kill()
    assert run_due() == []
    assert not DeferredOperation.objects.exists()
    assert eventually(lambda: request(kind).status_code == 202)
    assert_done_once(kind)


@pytest.mark.parametrize("claim", ["record", "lock"])
def test_the_attempt_of_a_worker_that_is_killed_counts(claim, payer):
    """A claim by lock would leave no record of it, and a poisonous operation would kill
    one worker after the other.
    """
    (kind, _other) = KINDS
    assert request(kind).status_code == 202
    with working("before", kind, claim) as worker:
        worker.kill()
    assert own_records().get().attempts == 1
    assert_done_once(kind)
