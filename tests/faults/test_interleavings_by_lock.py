"""Every order of statements when claims are locks, beside each other and beside claims
that are records.
"""

from __future__ import annotations

import pytest
from django.http import HttpResponse

from django_idempotency import maintenance
from django_idempotency.stores import lock_claims
from django_idempotency.stores.claim_function import (
    FUNCTION,
    OWNER_LOCK,
    TABLE_NUMBER,
    TRANSACTION,
)
from tests.faults.schedule import Violation
from tests.faults.world import RECORDS, retention_ends, told
from tests.support.callers import entry_point, pay
from tests.support.sql import run_sql, value_of
from tests.support.views_of_laws import OTHER_BODY

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.usefixtures("transactional_db"),
    pytest.mark.exhaustive,
]

OTHERS = pytest.mark.parametrize("other", ["lock", "record"])


@pytest.fixture
def locking(world):
    return world("atomic", claim="lock")


@OTHERS
def test_two_callers_one_of_which_may_die(locking, other):
    callers = dict.fromkeys("AB", locking.caller())
    if other == "record":
        callers["B"] = locking.caller(claim=other)
    assert locking.explore(callers, kills=1).states >= 20


@pytest.mark.parametrize(
    ("other", "outcome"),
    [("lock", 404), ("lock", 500), ("record", 404), ("record", ValueError())],
    ids=str,
)
def test_a_caller_whose_view_fails_or_refuses(locking, other, outcome):
    w = locking
    w.may_answer = w.may_answer | {404, 500, "ValueError"}
    w.refused = ("A",) if outcome == 404 else ()
    assert w.explore({"A": w.caller(outcome), "B": w.caller(claim=other)}).states >= 20


def different_requests(w, **other):
    def finish(results):
        answers = tuple(sorted(told(result)[0] for result in results.values()))
        assert answers in ((201, 422), (409, 422))
        assert len(w.ran) < 2, "L6: both ran"
        return answers

    return w.explore(
        {"A": w.caller(), "B": w.caller(body=OTHER_BODY, **other)}, finish=finish
    )


@OTHERS
def test_two_callers_with_different_requests(locking, other):
    assert (201, 422) in different_requests(locking, claim=other).outcomes


@OTHERS
def test_the_retention_ends_beside(locking, other):
    w = locking
    works = {"A": w.caller(), "cleanup": maintenance.cleanup, "expiry": retention_ends}
    earlier = w.caller(alone="earlier", claim=other)
    assert w.explore(works, given=earlier).states >= 20


OWNERS_LOCK = f"NOT pg_try_advisory_xact_lock({OWNER_LOCK.format(id='%s')})"
REQUESTS_LOCK = f"NOT pg_try_advisory_xact_lock(%s::bigint # {TABLE_NUMBER})"


@pytest.fixture
def take_out(monkeypatch):
    """Send a statement of claims by lock without a part of it."""

    def send_without(name, part, instead):
        statement = getattr(lock_claims, name)
        assert part in statement
        monkeypatch.setattr(lock_claims, name, statement.replace(part, instead))

    return send_without


@pytest.fixture
def take_out_of_the_function():
    """Make the function of claims by record anew without a part of it, until the end of
    the test.
    """

    def make(part, instead):
        assert part in FUNCTION
        run_sql(FUNCTION.replace(part, instead))

    yield make
    run_sql(FUNCTION)


def test_without_the_lock_of_the_key_two_requests_run(locking, take_out):
    take_out("CLAIM", OWNERS_LOCK, "%s::text || %s = ''")
    with pytest.raises(Violation, match="L6"):
        different_requests(locking)


def test_without_the_lock_of_the_request_a_duplicate_counts_as_a_mismatch(
    locking, take_out
):
    take_out("CLAIM", REQUESTS_LOCK, "%s = 0")
    with pytest.raises(Violation, match="422"):
        locking.explore(dict.fromkeys("AB", locking.caller()))


def test_a_claim_by_record_that_ignores_the_lock_runs_beside_it(
    locking, take_out_of_the_function
):
    take_out_of_the_function(
        "NOT pg_try_advisory_xact_lock_shared(owner_lock)", "false"
    )
    with pytest.raises(Violation, match="L6"):
        locking.explore({"A": locking.caller(), "B": locking.caller(claim="record")})


def test_without_the_lookup_the_index_undoes_the_second_run(locking, take_out):
    """No law is broken: who ran in vain answers with the response of the first."""

    def finish(results):
        ran.append(sorted(locking.ran & results.keys()))
        return locking.finish(results)

    ran = []
    take_out("LOOKUP", "record.id = %s", "record.id = %s AND false")
    locking.explore(dict.fromkeys("AB", locking.caller()), finish=finish)
    assert ["A", "B"] in ran


def test_without_lookup_and_index_a_request_takes_effect_twice(locking, take_out):
    take_out("LOOKUP", "record.id = %s", "record.id = %s AND false")
    index = value_of(
        "SELECT conname FROM pg_constraint WHERE contype = 'p' AND conrelid ="
        " %s::regclass",
        [RECORDS],
    )
    run_sql(f"ALTER TABLE {RECORDS} DROP CONSTRAINT {index}")
    try:
        with pytest.raises(Violation, match="L1"):
            locking.explore(dict.fromkeys("AB", locking.caller()))
    finally:
        run_sql(
            f"TRUNCATE {RECORDS}; ALTER TABLE {RECORDS} ADD CONSTRAINT {index} PRIMARY"
            " KEY (id)"
        )


def test_without_the_transactions_number_a_lost_run_is_stored(locking, monkeypatch):
    same = f"{TRANSACTION} = %s"
    assert same in lock_claims.INSERT
    monkeypatch.setattr(
        lock_claims, "INSERT", lock_claims.INSERT.replace(same, "%s::text IS NOT NULL")
    )

    def view(request):
        pay()
        run_sql("ROLLBACK")
        return HttpResponse("done", status=201)

    entry_point(view, **locking.policy)()
    with pytest.raises(AssertionError, match="L3, L4"):
        locking.look()
