"""What exactly-once costs on PostgreSQL: round trips, WAL flushes, and plans that stay
the same as the table grows.
"""

from __future__ import annotations

import statistics
import time
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import RequestFactory

from django_idempotency import engine
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import postgresql
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import (
    Claimed,
    InFlight,
    Keep,
    OnHold,
    Operation,
    StoredResponse,
)
from django_idempotency.values.policy import Atomic, Lease, Policy
from testproject.models import LedgerEntry
from tests.support.callers import Gate, operation
from tests.support.sql import run_sql
from tests.support.statements import buffers, nodes, sent_statements

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]

STUCK = 100_000
OURS = "django_idempotency_"
MODES = pytest.mark.parametrize("mode", ["atomic", "lease"])


@pytest.fixture(autouse=True)
def fresh_connection(transactional_db):
    """On which nothing is prepared, and nothing will be at its first claim."""
    connection.close()


@pytest.fixture
def user():
    return get_user_model().objects.create_user("carol")


def pay(request):
    LedgerEntry.objects.record(user=request.user, amount=1, reference="r")
    return HttpResponse("paid")


def statements_of(view, user, **headers):
    request = RequestFactory().post("/pay/", {"amount": 1}, headers=headers)
    request.user = user
    with sent_statements() as sent:
        assert view(request).content == b"paid"
    return sent


def test_atomic_mode_adds_a_round_trip_to_a_first_request_in_a_transaction(user):
    """The unprotected one sends BEGIN, its statement and COMMIT."""
    plain = statements_of(transaction.atomic(pay), user)
    protected = statements_of(idempotent(pay), user, idempotency_key="k")
    assert (len(plain.round_trips), len(protected.round_trips)) == (3, 4)
    claim, lock, complete = protected.on(OURS)
    assert protected.round_trips[0] == [claim]
    assert protected.round_trips[1] == ["BEGIN", lock]
    assert protected.round_trips[3] == [complete, "COMMIT"]
    assert "AND ctid = " in lock  # so that it reads no index
    for statement in (lock, complete):
        assert "AND created_at = " in statement  # it leads to the partition


def test_a_claim_by_lock_takes_the_round_trips_of_a_transaction(user):
    view = idempotent(mode=Atomic(claim="lock"))(pay)
    plain = statements_of(transaction.atomic(pay), user)
    first, replay = (
        statements_of(view, user, idempotency_key="k") for _request in range(2)
    )
    assert len(first.round_trips) == len(plain.round_trips) == 3
    claim, look, insert = first.on(OURS)
    assert first.round_trips[0] == ["BEGIN", claim, look]
    assert first.round_trips[2] == [insert, "COMMIT"]
    assert replay.round_trips == [["BEGIN", claim, look], ["COMMIT"]]


def test_lease_mode_adds_two_statements_to_a_first_request(user):
    plain = statements_of(pay, user)
    protected = statements_of(idempotent(mode="lease")(pay), user, idempotency_key="k")
    assert len(protected.all) - len(plain.all) == 2
    assert [protected.all[0], protected.all[-1]] == protected.on(OURS)


@MODES
def test_a_replay_takes_one_statement_in_all(user, mode):
    view = idempotent(mode=mode)(pay)
    statements_of(view, user, idempotency_key="k")
    assert len(statements_of(view, user, idempotency_key="k").all) == 1


def test_a_request_without_a_key_costs_nothing(user):
    assert len(statements_of(idempotent(pay), user).all) == len(
        statements_of(pay, user).all
    )


@pytest.mark.drf
def test_statements_of_an_endpoint_under_atomic_requests(user, monkeypatch, client):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    from rest_framework.authtoken.models import Token

    def charge(**headers):
        with sent_statements() as sent:
            body = {"amount": 1, "currency": "EUR", "reference": "r"}
            assert (
                client.post("/api/charges/", body, headers=headers).status_code == 201
            )
        return sent.all

    authorization = f"Token {Token.objects.create(user=user)}"
    plain = charge(authorization=authorization)
    assert (
        len(charge(authorization=authorization, idempotency_key="k")) == len(plain) + 3
    )
    authentication, replay = charge(authorization=authorization, idempotency_key="k")
    assert "authtoken_token" in authentication
    assert OURS in replay


@MODES
def test_a_duplicate_in_flight_takes_one_statement(payer, mode):
    with Gate().running(mode=mode), sent_statements() as sent:
        assert isinstance(engine.claim(operation(), Policy(mode=mode)), InFlight)
    assert len(sent.all) == 1


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [(Atomic(takeover_grace=0), Claimed), (Lease(on_crash="hold"), OnHold)],
    ids=["takeover", "hold"],
)
def test_a_takeover_takes_one_short_transaction_whatever_its_outcome(mode, outcome):
    engine.claim(operation(), Policy(mode=mode))
    IdempotencyRecord.objects.update(locked_until=ahead(-1))
    with sent_statements() as sent:
        assert isinstance(engine.claim(operation(), Policy(mode=mode)), outcome)
    assert len(sent.all) == 5
    assert (sent.all[1], sent.all[-1]) == ("BEGIN", "COMMIT")


@pytest.mark.parametrize(("mode", "claim_waits"), [("atomic", False), ("lease", True)])
def test_a_claim_in_lease_mode_and_each_completion_is_on_disk(
    slow_disk, mode, claim_waits
):
    # a machine that stood still, or another database that flushed, does not each time
    for attempt in range(5):
        runs = [_timed_run(Policy(mode=mode), f"{attempt}-{n}") for n in range(5)]
        claims, completions = map(statistics.median, zip(*runs, strict=True))
        waits = claims > slow_disk / 2, completions > slow_disk / 2
        if waits == (claim_waits, True):
            break
    assert waits == (claim_waits, True), runs


@pytest.fixture
def slow_disk():
    """Have each flush of the WAL that a commit of this session waits for take so many
    seconds.

    Less, where another database of the server flushes it meanwhile.
    """
    run_sql("SET commit_siblings = 0; SET commit_delay = 100000")
    yield 0.1
    connection.close()


def _timed_run(policy: Policy, key: str) -> tuple[float, float]:
    began = time.monotonic()
    claim = engine.claim(Operation("user:1", key, bytes(32)), policy)
    assert isinstance(claim, Claimed)
    claimed = time.monotonic()
    with engine.execution(claim, policy) as run:
        run.verdict = Keep(StoredResponse(200))
    return claimed - began, time.monotonic() - claimed


FILL = f"""
INSERT INTO {postgresql.TABLE} (
    id, scope, key, method, path, fingerprint, mode, created_at, updated_at,
        expires_at, purge_at, status, token,
    locked_at, locked_until, response_status, response_headers
)
SELECT gen_random_uuid(), 'user:1', i, 'POST', '/', '', 'atomic', now(), now(),
    now() + '1 day', now() + '1 day', %s
FROM generate_series(1, %s) AS i
"""
COMPLETED = "'completed', NULL, NULL, NULL, 200, '[]'"
PROCESSING = "'processing', gen_random_uuid(), now(), now() + '1 minute', NULL, NULL"


@pytest.fixture
def stuck():
    """Records stuck in processing since the last ANALYZE, for which the index of the
    live ones was still empty.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(FILL % (COMPLETED, 5000))
        cursor.execute(f"ANALYZE {postgresql.TABLE}")
        cursor.execute(FILL % (PROCESSING, STUCK))
        yield cursor
        transaction.set_rollback(True)


def _explained(cursor, statement, values):
    """Its plan, executed. The least buffers of several count: a session that has just
    heard of an ANALYZE reads the catalogue, too.
    """
    cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", values)
    return cursor.fetchone()[0][0]["Plan"]


@pytest.mark.plain_table
def test_statements_go_by_primary_key_beside_100000_stuck_records(stuck):
    policy = Policy()
    whose = (Operation("user:1", "k", bytes(32)).id, uuid4())
    answer = ("completed", 200, "[]", b"")
    created = {"created_at": "2026-11-21 12:00:00.123456+00"}
    ways = {
        "": {},
        " of a new record": created,
        " at its place": {"ctid": "(1,1)", **created},
    }
    statements = {
        f"{what}{way}": (
            postgresql.stated(statement, policy, *known),
            (*values, *whose, *known.values()),
        )
        for what, statement, values in (
            ("the row lock", postgresql.LOCK, ()),
            ("the completion", postgresql.COMPLETE, answer),
        )
        for way, known in ways.items()
    }
    statements |= {
        "the count of replays": (
            postgresql.COUNT_REPLAYS,
            {"ids": [whose[0]], "counts": [1]},
        )
    }
    for name, (statement, values) in statements.items():
        plans = [_explained(stuck, statement, values) for _time in range(3)]
        scans = [
            node
            for node in nodes(plans[0])
            if node.get("Relation Name") == postgresql.TABLE
        ]
        used = {
            node.get("Index Name", "no index")
            for node in scans
            if node["Node Type"] != "ModifyTable"
        }
        assert used == {
            "no index" if "at its place" in name else f"{postgresql.TABLE}_pkey"
        }, name
        assert min(map(buffers, plans)) < 60, name


@pytest.mark.plain_table
def test_a_claim_reads_few_pages_beside_100000_stuck_records(stuck):
    """Planned afresh five times in a session, then once for all."""
    for mode in ("atomic", "lease"):
        claim = postgresql.stated(postgresql.CLAIM, Policy(mode=mode))
        for plan, claims in (("planned for its values", 2), ("planned for all", 8)):
            for _claim in range(claims):
                new = (uuid4(), "user:1", str(uuid4()), "POST", "/", bytes(32), uuid4())
                stuck.execute(claim, new)
            for kind in ("old", "new"):
                plans = []
                for _time in range(3):
                    id = new[0] if kind == "old" else uuid4()
                    plans.append(_explained(stuck, claim, (id, *new[1:])))
                assert min(map(buffers, plans)) < 60, (mode, plan, kind)
