"""A crash at any point of an operation: each effect is there once, and a call that may
run at most once is never repeated without an operator.
"""

from __future__ import annotations

import pytest
from django.db import connection

from django_idempotency.maintenance.decisions import allow_retry
from django_idempotency.models import DatabaseNow, IdempotencyRecord
from tests.contrib.steps.conftest import run
from tests.contrib.steps.worker import POINTS, Provider, work, working
from tests.support.callers import effects, record, shift
from tests.support.commands import told
from tests.support.views_of_laws import HOUR
from tests.support.waiting import eventually

pytestmark = pytest.mark.postgresql
# where nobody can tell whether the fax was sent
UNKNOWN = ("in once", "after the fax")


def end_backends(only=None):
    """End the workers' sessions, as an administrator or a failover does."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND coalesce(pid = %s, true)",
            [only],
        )


def retried(provider):
    """What the client gets in the end, with an operator's help."""
    if record().token is not None:
        shift(locked_until=-HOUR)
    answer = run(lambda: work(provider))
    if isinstance(answer, dict):
        assert answer["code"] == "idempotency_key_on_hold"
        assert "fax" in record().reason
        assert isinstance(allow_retry(record().pk), IdempotencyRecord)
        answer = run(lambda: work(provider))
    return answer


def assert_each_was_done_once(provider, answer, *, faxes=1):
    assert answer[1:] == ["bank done", "fax done"]
    assert effects("reserved") == 1
    assert len(set(provider.keys("bank"))) == 1
    # where it may have been sent, the operator of these tests says that it was not
    assert len(provider.keys("fax")) == faxes


@pytest.mark.parametrize("point", POINTS)
def test_kill_9(point, tmp_path):
    """dbos-transact-py #805: pending for ever between two steps; #260: killed between
    a step's own tries.
    """
    provider = Provider(tmp_path / "provider")
    with working(point, provider.path) as worker:
        worker.kill()
    held = record().attempts
    answer = retried(provider)
    assert_each_was_done_once(provider, answer, faxes=1 + (point == "after the fax"))
    assert record().attempts - held == (2 if point in UNKNOWN else 1)


@pytest.mark.parametrize("point", POINTS)
def test_the_database_ends_the_session(point, tmp_path):
    provider = Provider(tmp_path / "provider")
    with working(point, provider.path) as worker:
        end_backends()
        worker.go_on()
        worker.says()
    if record().response_status is None:
        answer = retried(provider)
    else:
        answer = run(lambda: work(provider))
    assert_each_was_done_once(provider, answer)


def test_stopped_between_a_memo_and_its_commit(tmp_path):
    """It has the row of its record locked: nobody takes over until its session ends."""
    provider = Provider(tmp_path / "provider")
    with working("halfway", provider.path, lease=1) as worker:
        worker.stop()
        lapsed = IdempotencyRecord.objects.filter(locked_until__lt=DatabaseNow())
        eventually(lapsed.exists)
        assert run(lambda: work(provider))["code"] == "idempotency_key_in_use"
        (shown,) = told("idempotency_keys", "show", "k")
        end_backends(shown["session"]["process"])

        def taken_over():
            answer = run(lambda: work(provider))
            return answer if isinstance(answer, list) else None

        answer = eventually(taken_over)
        worker.resume()
        worker.go_on()
        assert worker.says() in (answer, "ClaimLost")
    assert_each_was_done_once(provider, answer)


# halfway, see above
@pytest.mark.parametrize("point", [each for each in POINTS if each != "halfway"])
def test_stopped_beyond_its_lease(point, tmp_path):
    """And woken up once another attempt is done."""
    provider = Provider(tmp_path / "provider")
    with working(point, provider.path) as worker:
        worker.stop()
        answer = retried(provider)
        worker.resume()
        worker.go_on()
        said = worker.says()
    assert said in (answer, "ClaimLost")
    assert_each_was_done_once(provider, answer, faxes=1 + (point in UNKNOWN))
