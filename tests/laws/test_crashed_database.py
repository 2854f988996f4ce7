"""L4: a run whose database crashed is run again, although PostgreSQL gives the number
of its transaction to another.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import psycopg
import pytest
from django.db import OperationalError, connections
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Atomic, Policy
from tests.faults.cluster import room, running_cluster
from tests.support.aliases import alias_of_cluster
from tests.support.callers import SCOPE, entry_point, when
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.server, pytest.mark.slow]
PRIVATE = "private"


@pytest.fixture(scope="module")
def cluster():
    """A server that writes nothing of a transaction before its COMMIT: nor the next
    number, as it does for standbys, and in a checkpoint.
    """
    parameters = {
        "wal_writer_delay": "10s",
        "autovacuum": "off",
        "wal_level": "minimal",
        "max_wal_senders": "0",
        "checkpoint_timeout": "1h",
    }
    with room() as place, running_cluster(place, **parameters) as running:
        yield running


@pytest.fixture
def server(cluster, transactional_db):
    """That server, with our table in the database ``PRIVATE``."""
    with alias_of_cluster(PRIVATE, cluster):
        cluster.execute(
            "DROP TABLE IF EXISTS effect, written; TRUNCATE django_idempotency_record"
        )
        cluster.execute(
            "CREATE TABLE effect (attempt integer); CREATE TABLE written ()"
        )
        stop_wal_writer(cluster)
        yield cluster


IDLE = """
SELECT pid FROM pg_stat_activity
WHERE backend_type = 'walwriter' AND wait_event = 'WalWriterMain'
"""


def stop_wal_writer(server):
    """Every ten seconds it would write the claims, whose COMMIT does not wait for that.
    A crash brings another one.
    """
    (process,) = eventually(lambda: server.execute(IDLE))
    os.kill(process, signal.SIGSTOP)


@pytest.fixture
def durable_claims(server):
    """Have the disk know of a claim before its run begins, as the next COMMIT of
    anybody does.
    """

    def flush(**_named):
        server.execute("INSERT INTO written DEFAULT VALUES")

    with when(signals.key_claimed, flush):
        yield


def commit_transactions_up_to(number, server):
    """Have others use the numbers of the transactions that the crash has made
    unknown.
    """
    with psycopg.connect(server.url(), autocommit=True) as connection:
        while (
            connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[
                0
            ]
            < number
        ):
            pass
        return connection.execute(
            "SELECT pg_xact_status(%s::text::xid8)", [str(number)]
        ).fetchone()[0]


OTHERS = pytest.mark.parametrize(
    "others", [False, True], ids=["nobody else", "others commit"]
)


@OTHERS
@pytest.mark.parametrize("claim", ["record", "lock"])
def test_a_crashed_run_is_not_taken_for_one_that_committed_early(
    server, claim, others, request
):
    if claim == "record":
        request.getfixturevalue("durable_claims")

    def view(request):
        with connections[PRIVATE].cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()::text::bigint")
            (number,) = cursor.fetchone()
            if request.idempotency.attempt == 1:
                server.crash()
                assert (
                    not others
                    or commit_transactions_up_to(number, server) == "committed"
                )
                # as a duplicate does
                server.execute("SELECT FROM django_idempotency_record FOR UPDATE")
            cursor.execute(
                "INSERT INTO effect VALUES (%s)", [request.idempotency.attempt]
            )
        return HttpResponse(status=201)

    pay = entry_point(view, using=PRIVATE, mode=Atomic(claim=claim))
    with pytest.raises(OperationalError):
        pay("k")
    crashed = IdempotencyRecord.objects.using(PRIVATE).filter(pk=record_id(SCOPE, "k"))
    left = [("failed", False, "OperationalError")] if claim == "record" else []
    assert list(crashed.values_list("status", "on_hold", "reason")) == left
    if claim == "record":
        assert pay("k").status_code == 201
        assert server.execute("SELECT array_agg(attempt) FROM effect") == ([2],)


@OTHERS
@pytest.mark.parametrize(
    ("claim", "status"),
    [("record", 409), pytest.param("lock", 503, marks=pytest.mark.not_on_citus)],
)
def test_a_released_key_is_not_reported_if_its_commit_was_lost(
    server, claim, status, others
):
    """The number of its transaction is given to another one, be it the next look at the
    key. A record is lost, too.
    """

    def crash(number):
        patch.undo()  # or each look at the key would crash the server, too
        server.crash()
        assert not others or commit_transactions_up_to(number, server) == "committed"
        connections[PRIVATE]._commit()

    def view(request):
        with connections[PRIVATE].cursor() as cursor:
            cursor.execute(
                "INSERT INTO effect VALUES (1) RETURNING"
                " pg_current_xact_id()::text::bigint"
            )
            (number,) = cursor.fetchone()
        patch.setattr(connections[PRIVATE], "_commit", partial(crash, number))
        return HttpResponse(status=404)

    with pytest.MonkeyPatch.context() as patch:
        response = entry_point(view, using=PRIVATE, mode=Atomic(claim=claim))("k")
    assert (response.status_code, server.execute("SELECT count(*) FROM effect")) == (
        status,
        (0,),
    )


def test_a_number_is_that_of_another_transaction_on_another_server(transactional_db):
    """As after a failover, which does not reset the statistics of the server that takes
    over.
    """
    claim = engine.claim(Operation(SCOPE, "k", b"f" * 32, "POST", "/"), Policy())
    store = store_for(Policy())
    with store.transaction():
        claim = store.lock(claim)
    number, server = claim.receipt.transaction.split("@")
    elsewhere = claim.with_receipt(
        claim.receipt._replace(transaction=f"{number}@{float(server) - 1}")
    )
    assert [store._has_committed(one) for one in (claim, elsewhere)] == [True, False]
    assert store.fail(elsewhere, "lost")
    assert not IdempotencyRecord.objects.get().on_hold
