"""Lease mode under real servers: a run that takes several leases is not overtaken,
wherever the heartbeat runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from django_idempotency.models import IdempotencyRecord
from tests.support.callers import effects, entry_point, paying
from tests.support.servers import running_server, running_uvicorn, unless_in_flight
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

# Seconds; a heartbeat that takes longer than a sixth of the lease has failed, and a
# process that stalls for a lease has lost it.
LEASE, LONG = 10, 25


def gunicorn(worker_class, *options):
    def running(database_url, directory, **environment):
        arguments = " ".join(("--timeout", "120", *options))
        own = {"WORKER_CLASS": worker_class, "GUNICORN_CMD_ARGS": arguments}
        return running_server(database_url, directory, **environment, **own)

    return running


SERVERS = {
    "gunicorn-threads": gunicorn("gthread"),
    "gunicorn-forked-after-import": gunicorn("gthread", "--preload"),
    "gunicorn-gevent": gunicorn("gevent"),
    "uvicorn": running_uvicorn,
}
ONLY_ON = {"gunicorn-gevent": "postgresql"}


def run_beside_retries(name, database_url, directory):
    """The response to a long run, that to the retries that were sent all the while, and
    what the runs noted.
    """
    runs = directory / "runs.jsonl"
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
        "RUNS_LOG": str(runs),
        "LEASE": str(LEASE),
    }

    def send():
        return server.request(
            "POST", "/runs/", key=name, token=None, json={"seconds": LONG}
        )

    with SERVERS[name](database_url, directory, **environment) as server:
        server.ledger("-")  # it serves
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(send)
            eventually(runs.exists, within=120)
            again = eventually(
                lambda: unless_in_flight(send()), within=4 * LONG, every=0.25
            )
            assert (first.result().status_code, again.status_code) == (
                201,
                201,
            ), server.log()
    notes = [json.loads(line)["at"] for line in runs.read_text().splitlines()]
    return first.result(), again, notes


@pytest.fixture(scope="module")
def long_runs(server_database, tmp_path_factory) -> Iterator[dict[str, Future[Any]]]:
    """By server; at the same time, because each of them takes long."""
    with ThreadPoolExecutor(len(SERVERS)) as pool:
        yield {
            name: pool.submit(
                run_beside_retries, name, server_database, tmp_path_factory.mktemp(name)
            )
            for name in SERVERS
            if ONLY_ON.get(name, connection.vendor) == connection.vendor
        }


@pytest.mark.server
@pytest.mark.row_locks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=getattr(pytest.mark, ONLY_ON[name]) if name in ONLY_ON else ()
        )
        for name in SERVERS
    ],
)
def test_a_run_that_takes_several_leases_is_not_overtaken(long_runs, name):
    first, again, notes = long_runs[name].result()
    assert first.json() == again.json()
    assert notes == ["begin", "end"]


@pytest.mark.usefixtures("payer")
def test_lease_mode_is_refused_where_uwsgi_has_threads_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(has_threads=0))
    answer = entry_point(paying, mode="lease")()
    assert answer.status_code == 503
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
    assert entry_point(paying)().status_code == 201, "atomic mode needs none"
