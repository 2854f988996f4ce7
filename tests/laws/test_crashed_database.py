"""L4: a run whose database crashed is run again, although PostgreSQL gives the number of its transaction to another."""

from __future__ import annotations

from functools import partial

import psycopg
import pytest
from django.db import OperationalError, connections
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic
from django_idempotency.values.keys import record_id
from tests.faults.cluster import room, running_cluster
from tests.support.aliases import alias_of_cluster
from tests.support.callers import SCOPE, entry_point

pytestmark = [pytest.mark.postgresql, pytest.mark.server, pytest.mark.slow]
PRIVATE = "private"


@pytest.fixture
def server(transactional_db):
    """A server that writes nothing of a transaction before its COMMIT, with our table in the database ``PRIVATE``."""
    with (
        room() as directory,
        running_cluster(directory, wal_writer_delay="10s", autovacuum="off") as cluster,
        alias_of_cluster(PRIVATE, cluster),
    ):
        cluster.execute("CREATE TABLE effect (attempt integer)")
        cluster.execute("CREATE TABLE written ()")
        yield cluster


@pytest.fixture
def durable_claims(server):
    """Have the disk know of a claim before its run begins, as the next COMMIT of anybody does."""

    def flush(**_named):
        server.execute("INSERT INTO written DEFAULT VALUES")

    signals.key_claimed.connect(flush)
    yield
    signals.key_claimed.disconnect(flush)


def commit_transactions_up_to(number, server):
    """Have others use the numbers of the transactions that the crash has made unknown."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        while connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0] < number:
            pass
        return connection.execute("SELECT pg_xact_status(%s::text::xid8)", [str(number)]).fetchone()[0]


OTHERS = pytest.mark.parametrize("others", [False, True], ids=["nobody else", "others commit"])


@OTHERS
@pytest.mark.parametrize("claim", ["record", "lock"])
def test_a_crashed_run_is_not_taken_for_one_that_committed_early(server, claim, others, request):
    if claim == "record":
        request.getfixturevalue("durable_claims")

    def view(request):
        with connections[PRIVATE].cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()::text::bigint")
            (number,) = cursor.fetchone()
            if request.idempotency.attempt == 1:
                server.kill()
                server.start()
                assert not others or commit_transactions_up_to(number, server) == "committed"
                server.execute("SELECT FROM django_idempotency_record FOR UPDATE")  # as a duplicate does
            cursor.execute("INSERT INTO effect VALUES (%s)", [request.idempotency.attempt])
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
@pytest.mark.parametrize(("claim", "status"), [("record", 409), ("lock", 503)])
def test_a_released_key_is_not_reported_if_its_commit_was_lost(server, claim, status, others):
    """The number of its transaction is given to another one, be it the next look at the key. A record is lost, too."""

    def crash(number):
        patch.undo()  # or each look at the key would crash the server, too
        server.kill()
        server.start()
        assert not others or commit_transactions_up_to(number, server) == "committed"
        connections[PRIVATE]._commit()

    def view(request):
        with connections[PRIVATE].cursor() as cursor:
            cursor.execute("INSERT INTO effect VALUES (1) RETURNING pg_current_xact_id()::text::bigint")
            (number,) = cursor.fetchone()
        patch.setattr(connections[PRIVATE], "_commit", partial(crash, number))
        return HttpResponse(status=404)

    with pytest.MonkeyPatch.context() as patch:
        response = entry_point(view, using=PRIVATE, mode=Atomic(claim=claim))("k")
    assert (response.status_code, server.execute("SELECT count(*) FROM effect")) == (status, (0,))
