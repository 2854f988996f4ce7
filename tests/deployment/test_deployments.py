"""The same promises under the settings, pools, servers and test cases that projects
have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.db import connection

from tests.support.callers import effects, entry_point, paying, payment
from tests.support.servers import (
    ROOT,
    Server,
    children,
    running_server,
    running_uvicorn,
    unless_in_flight,
)
from tests.support.sql import run_sql, value_of
from tests.support.threads import OtherThread, in_threads
from tests.support.views_of_laws import in_each_mode
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

MANY = 10


only_postgresql = pytest.mark.postgresql
DEPLOYMENTS = [
    pytest.param(
        {"ATOMIC_REQUESTS": "1", "CONN_MAX_AGE": "60"},
        id="ATOMIC_REQUESTS-CONN_MAX_AGE",
    ),
    pytest.param({"WORKER_CLASS": "sync"}, id="sync_workers", marks=only_postgresql),
    pytest.param({"WORKER_CLASS": "gevent"}, id="gevent", marks=only_postgresql),
    pytest.param(
        {"DJANGO_SETTINGS_MODULE": "tests.support.settings.pooled"},
        id="psycopg_pool",
        marks=only_postgresql,
    ),
    pytest.param(
        {"query": "isolation_level=3"}, id="REPEATABLE_READ", marks=only_postgresql
    ),
    pytest.param(
        {"query": "isolation_level=4"}, id="SERIALIZABLE", marks=only_postgresql
    ),
    pytest.param(
        {"pgbouncer": "1", "CONN_MAX_AGE": "60"},
        id="PgBouncer",
        marks=pytest.mark.pgbouncer,
    ),
]


UVICORN = pytest.param({"uvicorn": "1"}, id="uvicorn")


def under(*deployments: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "deployed", deployments, indirect=True, scope="module"
    )


@pytest.fixture(scope="module")
def deployed(request, server_database, tmp_path_factory) -> Iterator[Server]:
    # each worker loads the project, for longer than gunicorn waits by default
    environment = {
        "GUNICORN_CMD_ARGS": "--timeout 120",
        "OPENAPI": "1",
        **request.param,
    }
    url = server_database
    running = running_uvicorn if environment.pop("uvicorn", None) else running_server
    if environment.pop("pgbouncer", None):
        url = request.getfixturevalue("pgbouncer")(url)
    if query := environment.pop("query", None):
        url = f"{url}?{query}"
    with running(url, tmp_path_factory.mktemp("deployed"), **environment) as server:
        yield server


@pytest.fixture
def name(request) -> str:
    """Of this test under this deployment: for keys and references."""
    return request.node.name


CHARGES, ASYNC = "/api/charges/", "/async/orders/"
PATHS = [CHARGES, "/orders/", "/legacy/refunds/", "/legacy/api/refunds/"]


def sent(server, name, path=CHARGES, **options) -> httpx.Response:
    return server.post(path, payment(name), key=name, **options)


def at_once(server, name, path=CHARGES) -> set[bytes]:
    """The responses to so many duplicates, without refusals."""
    answers = in_threads(MANY, lambda _index: sent(server, name, path))
    assert {answer.status_code for answer in answers} <= {201, 409}
    return {answer.content for answer in answers if answer.status_code == 201}


def in_the_end(server, name, path=CHARGES) -> httpx.Response:
    return eventually(lambda: unless_in_flight(sent(server, name, path)))


@pytest.mark.server
@under(*DEPLOYMENTS, UVICORN)
@pytest.mark.parametrize("path", PATHS)
def test_a_retry_gets_the_first_response(deployed, name, path):
    first, again = (sent(deployed, name, path) for _time in range(2))
    assert (first.status_code, first.content) == (201, again.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert deployed.ledger(name) == 1
    assert deployed.post(path, payment("other"), key=name).status_code == 422


@pytest.mark.server
@under(*DEPLOYMENTS, UVICORN)
def test_of_concurrent_duplicates_one_takes_effect(deployed, name):
    assert len(at_once(deployed, name)) == 1
    assert deployed.ledger(name) == 1


@pytest.mark.server
@under(*DEPLOYMENTS)
def test_concurrent_retries_after_a_kill_take_effect_once(deployed, name):
    with pytest.raises(httpx.TransportError):
        sent(deployed, name, simulate={"kill": "after"})
    at_once(deployed, name)
    in_the_end(deployed, name)
    assert deployed.ledger(name) == 1


@pytest.mark.server
@under(*DEPLOYMENTS)
def test_different_keys_all_take_effect(deployed, name):
    def pay(index: int) -> int:
        key = f"{name}-{index}"
        return deployed.post(CHARGES, payment(name), key=key).status_code

    assert in_threads(MANY, pay) == [201] * MANY
    assert deployed.ledger(name) == MANY


@pytest.mark.server
# in lease mode the view's own transactions have the whole of SQLite to contend for
@pytest.mark.row_locks
@under(UVICORN)
def test_an_async_view_takes_effect_once(deployed, name):
    answered = at_once(deployed, name, ASYNC)
    again = sent(deployed, name, ASYNC)
    assert answered == {again.content}
    assert again.headers["Idempotent-Replayed"] == "true"
    assert deployed.ledger(name) == 1
    assert deployed.post(ASYNC, payment("other"), key=name).status_code == 422


@pytest.mark.server
@under(UVICORN)
def test_under_asgi_a_caller_that_hangs_up_can_come_back(deployed, name):
    with pytest.raises(httpx.TimeoutException):
        sent(deployed, name, ASYNC, simulate={"delay_ms": 20_000}, timeout=0.5)
    assert in_the_end(deployed, name, ASYNC).status_code == 201
    assert deployed.ledger(name) == 1


@pytest.mark.server
def test_serve_runs_as_many_workers_as_the_environment_says(server_database):
    given = {"DATABASE_URL": server_database, "DEBUG": "1", "PORT": "0", "WORKERS": "3"}
    with subprocess.Popen(
        [sys.executable, "-m", "testproject", "serve"],
        cwd=ROOT,
        env=os.environ | given,
        stdout=subprocess.DEVNULL,
    ) as serve:
        try:
            eventually(
                lambda: (
                    len(
                        [
                            worker
                            for server in children(serve.pid)
                            for worker in children(server)
                        ]
                    )
                    == 3
                ),
                within=180,  # it migrates and seeds first
            )
        finally:
            serve.terminate()


@pytest.mark.row_locks
@in_each_mode
@pytest.mark.usefixtures("payer")
def test_a_server_that_hung_up_between_requests_is_not_noticed(other_thread, mode):
    send = entry_point(paying, mode=mode)
    for number in range(5):  # until all is prepared
        assert send(f"before-{number}").status_code == 201
    for key, count in [("k", 6), ("other", 7), ("k", 7)]:
        hang_up(other_thread)
        assert send(key).status_code == 201
        assert effects() == count


KILL = {
    "postgresql": "SELECT pg_terminate_backend(%s, 30000)",
    "mysql": "KILL %s",
}


def hang_up(other_thread: OtherThread) -> None:
    """The server ends this thread's connection; the client has not heard of it."""
    identity = {"postgresql": "pg_backend_pid()", "mysql": "connection_id()"}[
        connection.vendor
    ]
    number = value_of(f"SELECT {identity}")
    other_thread(run_sql, KILL[connection.vendor], [number])
