"""Lease mode under real servers: a run that takes several leases is not overtaken,
wherever the heartbeat runs.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from django_idempotency.models import IdempotencyRecord
from tests.support.callers import effects, entry_point, paying
from tests.support.servers import running_server, running_uvicorn, unless_in_flight
from tests.support.waiting import eventually

# seconds; a heartbeat that takes longer than a sixth of the lease has failed
LEASE, LONG = 3, 7.5


def gunicorn(worker_class, *options):
    def running(database_url, directory, **environment):
        own = {"WORKER_CLASS": worker_class, "GUNICORN_CMD_ARGS": " ".join(options)}
        return running_server(database_url, directory, **environment, **own)

    return running


SERVERS = [
    pytest.param(gunicorn("gthread"), id="gunicorn, threads"),
    pytest.param(gunicorn("gthread", "--preload"), id="gunicorn, forked after import"),
    pytest.param(
        gunicorn("gevent"), id="gunicorn, gevent", marks=pytest.mark.postgresql
    ),
    pytest.param(running_uvicorn, id="uvicorn"),
]


@pytest.mark.server
@pytest.mark.row_locks
@pytest.mark.parametrize("running", SERVERS)
def test_a_run_that_takes_several_leases_is_not_overtaken(
    running, server_database, tmp_path, request
):
    runs, key = (
        tmp_path / "runs.jsonl",
        request.node.callspec.id.translate({ord(","): None, ord(" "): "-"}),
    )
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
        "RUNS_LOG": str(runs),
        "LEASE": str(LEASE),
    }

    def send():
        return server.request(
            "POST", "/runs/", key=key, token=None, json={"seconds": LONG}
        )

    with running(server_database, tmp_path, **environment) as server:
        server.ledger("-")  # it serves
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(send)
            eventually(runs.exists)
            again = eventually(lambda: unless_in_flight(send()))
            assert (first.result().status_code, again.status_code) == (
                201,
                201,
            ), server.log()
    assert first.result().json() == again.json()
    assert [json.loads(line)["at"] for line in runs.read_text().splitlines()] == [
        "begin",
        "end",
    ]


@pytest.mark.usefixtures("payer")
def test_lease_mode_is_refused_where_uwsgi_has_threads_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(has_threads=0))
    answer = entry_point(paying, mode="lease")()
    assert answer.status_code == 503
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
    assert entry_point(paying)().status_code == 201, "atomic mode needs none"
