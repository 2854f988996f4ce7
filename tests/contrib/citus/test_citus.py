"""On Citus itself, where one is given: what its workers refuse, and requests while they and it are killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psycopg
import pytest
from django.db import IntegrityError, transaction

from django_idempotency import engine
from django_idempotency.contrib.citus.store import in_shards, is_distributed
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.errors import store_errors
from django_idempotency.values.outcomes import Claimed, Operation
from django_idempotency.values.policy import Policy
from tests.support import distributed
from tests.support.callers import payment
from tests.support.checks import ids_found
from tests.support.waiting import eventually

pytestmark = [pytest.mark.citus, pytest.mark.usefixtures("transactional_db")]
KEYS, CLIENTS = 48, 8
KILLED = ({"kill": "before"}, {"kill": "after"}, None, None)


def claimed(key):
    outcome = engine.claim(Operation("s", key, bytes(32), "POST", "/"), Policy())
    assert isinstance(outcome, Claimed)
    return outcome


def test_the_table_is_distributed():
    assert is_distributed("default")
    assert ids_found("E031", "E034") == []


def test_ids_are_grouped_by_shard():
    ids = [claimed(f"k{number}").id for number in range(40)]
    groups = in_shards(ids, "default")
    assert sorted(id for group in groups for id in group) == sorted(ids)
    assert 1 < len(groups) < len(ids)
    for group in groups:
        with transaction.atomic():
            assert len(
                IdempotencyRecord.objects.select_for_update().filter(pk__in=group)
            ) == len(group)


def test_a_check_of_a_worker_is_no_missing_partition(caplog):
    """It comes without its name, and without that of its table."""
    rows = IdempotencyRecord.objects.filter(pk=claimed("k").id)
    with pytest.raises(IntegrityError) as caught, store_errors():
        rows.update(status="unheard of")
    assert "violates check constraint" in str(caught.value)
    assert [record.event for record in caplog.records if hasattr(record, "event")] == []


@pytest.mark.server
def test_every_key_takes_effect_once_while_processes_and_servers_are_killed(
    start_server,
):
    """The processes that serve die in the midst of requests, and one Citus worker after the other crashes."""
    server = start_server(WORKERS="4")
    with ThreadPoolExecutor(CLIENTS) as clients:
        bodies = [
            clients.submit(insist, server, f"k{number}", KILLED[number % 4])
            for number in range(KEYS)
        ]
        _coordinator, *workers = distributed.nodes()
        for worker in workers:
            crash(worker)
        first = [body.result(180) for body in bodies]
    assert [server.ledger(f"k{number}") for number in range(KEYS)] == [1] * KEYS
    assert [insist(server, f"k{number}", None) for number in range(KEYS)] == first


def insist(server, key, fault):
    """Send the request until there is a response, and return that; the first one meets ``fault``."""
    faults = iter([fault])

    def sent():
        try:
            response = server.post(
                "/api/charges/", payment(key), key=key, simulate=next(faults, None)
            )
        except httpx.TransportError:
            return None
        assert response.status_code in (201, 409, 500, 503), response.text
        return response.content if response.status_code == 201 else None

    return eventually(sent, within=120)


def crash(worker):
    """As if one of its processes had been killed for want of memory: all of them end, and it recovers."""
    session = distributed.to(worker, "postgres")
    os.kill(session.info.backend_pid, signal.SIGKILL)
    eventually(lambda: ends(session) and answers(worker), within=60)


def ends(session):
    try:
        session.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


def answers(worker):
    try:
        distributed.to(worker, "postgres").close()
    except psycopg.OperationalError:
        return False
    return True
