"""On Citus itself, where one is given: what its workers refuse, and requests while they
and it are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, permutations
from pathlib import Path
from threading import Event

import httpx
import psycopg
import pytest
from django.db import IntegrityError, transaction

from django_idempotency import engine
from django_idempotency.contrib.citus.store import in_shards, is_distributed
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.errors import store_errors
from django_idempotency.values.outcomes import Claimed, Operation
from django_idempotency.values.policy import Policy
from tests.support import distributed
from tests.support.callers import payment
from tests.support.checks import ids_found
from tests.support.waiting import eventually

pytestmark = [pytest.mark.citus, pytest.mark.usefixtures("transactional_db")]
CLIENTS = 8
KILLED = ({"kill": "before"}, None, None, None, {"kill": "after"}, None, None, None)


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


def test_a_failed_check_on_a_worker_is_not_taken_for_a_missing_partition(caplog):
    """It comes without its name, and without that of its table."""
    rows = IdempotencyRecord.objects.filter(pk=claimed("k").id)
    with pytest.raises(IntegrityError) as caught, store_errors():
        rows.update(status="unheard of")
    assert "violates check constraint" in str(caught.value)
    assert [record.event for record in caplog.records if hasattr(record, "event")] == []


def crash_workers(_database):
    """As if a process of one had been killed for want of memory, then one of the
    other: all processes of the server end, and it recovers.
    """
    for worker in distributed.nodes()[1:]:
        session = distributed.to(worker, "postgres")
        os.kill(session.info.backend_pid, signal.SIGKILL)
        eventually(lambda: ends(session) and answers(worker))  # noqa: B023


def kill_workers(_database):
    for worker in distributed.nodes()[1:]:
        kill(worker)


def kill_coordinator(_database):
    kill(distributed.nodes()[0])


def kill(node):
    """Kill the server's first process by SIGKILL, and start the server again as it was
    started.
    """
    with distributed.to(node, "postgres") as session:
        (directory,) = session.execute("SHOW data_directory").fetchone()
    pid = int((Path(directory) / "postmaster.pid").read_text().split()[0])
    process = Path(f"/proc/{pid}")
    command = process.joinpath("cmdline").read_text().split("\0")[:-1]
    given = dict(
        line.split("=", 1)
        for line in process.joinpath("environ").read_text().split("\0")
        if "=" in line
    )
    owner = process.stat()
    os.kill(pid, signal.SIGKILL)

    def starts():
        """Not while a process of the killed server is left."""
        subprocess.run(
            ["sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *command],
            env=given,
            user=owner.st_uid,
            group=owner.st_gid,
            start_new_session=True,
            check=True,
        )
        with suppress(TimeoutError):
            return eventually(lambda: answers(node), within=5)

    eventually(starts)


def move_shards(database):
    """Four in each way from the one worker to the other, and back."""
    coordinator, *workers = distributed.nodes()
    with distributed.to(coordinator, database.rpartition("/")[2]) as session:
        for (host, port), target in permutations(workers):
            shards = session.execute(
                "SELECT shardid FROM citus_shards WHERE table_name ="
                " 'django_idempotency_record'::regclass AND nodename = %s AND nodeport"
                " = %s ORDER BY shardid LIMIT 8",
                (host, port),
            ).fetchall()
            for number, (shard,) in enumerate(shards):
                session.execute(
                    "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s,"
                    " shard_transfer_mode := %s)",
                    (
                        *(shard, host, port, *target),
                        ("force_logical", "block_writes")[number % 2],
                    ),
                )


def ends(session):
    try:
        session.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


def answers(node):
    try:
        distributed.to(node, "postgres").close()
    except psycopg.OperationalError:
        return False
    return True


DISTURBANCES = [crash_workers, kill_workers, kill_coordinator, move_shards]


def test_the_dashboard_counts_up():
    for _time in range(2):
        counters.count("key_claimed", "a view")
        counters.flush()
    counted = IdempotencyCounter.objects.filter(view="a view")
    # in two rows, if five minutes have ended between them
    assert sum(counted.values_list("count", flat=True)) == 2


@pytest.mark.server
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_every_key_takes_effect_once_while(disturb, start_server, server_database):
    """Clients send charges from before until after the disturbance. The processes that
    serve die in the midst of every fourth first request, too.
    """
    server = start_server(WORKERS="4")
    numbers, over, bodies, unserved = count(), Event(), {}, []

    def send():
        while not over.is_set():
            number = next(numbers)
            key = f"{disturb.__name__}{number}"
            bodies[key] = insist(server, key, KILLED[number % len(KILLED)], unserved)

    with ThreadPoolExecutor(CLIENTS) as clients:
        sending = [clients.submit(send) for _ in range(CLIENTS)]
        try:
            eventually(lambda: len(bodies) > CLIENTS)
            disturb(server_database)
            served = len(bodies)
            eventually(lambda: len(bodies) > served + CLIENTS, within=180)
        finally:
            over.set()
        for each in sending:
            each.result(180)
    print(f"{disturb.__name__}: {len(bodies)} keys, {Counter(unserved)}")
    assert {key: server.ledger(key) for key in bodies} == dict.fromkeys(bodies, 1)
    assert {key: insist(server, key) for key in bodies} == bodies


def insist(server, key, fault=None, unserved=None):
    """Send the request until there is a response, and return that; the first one meets
    ``fault``. What else it gets is added to ``unserved``.
    """
    faults = iter([fault])

    def sent():
        try:
            response = server.post(
                "/api/charges/", payment(key), key=key, simulate=next(faults, None)
            )
        except httpx.TransportError as error:
            seen = type(error).__name__
        else:
            if response.status_code == 201:
                return response.content
            seen = response.status_code
            assert seen in (409, 500, 503), response.text
        if unserved is not None:
            unserved.append(seen)
        return None

    return eventually(sent, within=120)
