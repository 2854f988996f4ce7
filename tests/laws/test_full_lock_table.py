"""L12, L1: where PostgreSQL's table of locks is full, a claim is refused with 503, and nothing runs a second time."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from django.db import OperationalError, connections
from django.http import HttpResponse

from django_idempotency.policy import Atomic
from tests.faults.cluster import room, running_cluster
from tests.support.aliases import alias_of_cluster
from tests.support.callers import entry_point

pytestmark = [pytest.mark.postgresql, pytest.mark.server]
PRIVATE = "private"
CLAIMS = pytest.mark.parametrize("claim", ["record", "lock"])


@pytest.fixture(scope="module")
def small_server():
    """A server with room for few locks: these settings are its least."""
    with (
        room() as directory,
        running_cluster(directory, max_locks_per_transaction="10", max_connections="8", autovacuum="off") as cluster,
    ):
        yield cluster


@pytest.fixture
def server(small_server, transactional_db):
    """It, with our table in the database ``PRIVATE``, and no effect yet."""
    with alias_of_cluster(PRIVATE, small_server):
        small_server.execute("TRUNCATE django_idempotency_record")
        small_server.execute("DROP TABLE IF EXISTS effect")
        small_server.execute("CREATE TABLE effect (key text)")
        yield small_server


@contextmanager
def full_lock_table(server):
    with psycopg.connect(server.url(), autocommit=True) as session:
        with pytest.raises(psycopg.errors.OutOfMemory):
            session.execute("SELECT pg_advisory_lock(number) FROM generate_series(1, 1000000) AS number")
        try:
            yield
        finally:
            session.execute("SELECT pg_advisory_unlock_all()")  # a session's end is not waited for


def writing(request):
    with connections[PRIVATE].cursor() as cursor:
        cursor.execute("INSERT INTO effect VALUES (%s)", [request.idempotency.key])
    return HttpResponse(status=201)


def effects(server):
    return server.execute("SELECT count(*) FROM effect")[0]


@CLAIMS
def test_a_claim_that_gets_no_lock_is_refused_and_its_retry_runs(server, claim):
    pay = entry_point(writing, using=PRIVATE, mode=Atomic(claim=claim))
    assert pay("before").status_code == 201
    with full_lock_table(server):
        refused = pay("k")
        assert refused.status_code == pay("before").status_code == 503
        assert "Retry-After" in refused
    assert effects(server) == 1
    assert [pay("k").status_code for _retry in range(2)] == [201, 201]
    assert pay("before")["Idempotent-Replayed"] == "true"
    assert effects(server) == 2


@CLAIMS
@pytest.mark.parametrize("when", ["before it writes", "after it has written"])
def test_a_run_during_which_the_table_fills_up_has_one_effect(server, claim, when):
    """Whether it gets the locks that it still needs depends on what its session has used before."""

    def view(request):
        times.append(when if not times else "never")
        if times[-1] == "before it writes":
            filled.enter_context(full_lock_table(server))
        response = writing(request)
        if times[-1] == "after it has written":
            filled.enter_context(full_lock_table(server))
        return response

    times, filled = [], ExitStack()
    pay = entry_point(view, using=PRIVATE, mode=Atomic(claim=claim))
    with filled:
        try:
            done = pay("k").status_code == 201
        except OperationalError:
            done = False
    assert effects(server) == done
    assert pay("k").status_code == 201
    assert effects(server) == 1
