"""The same promises under the settings, pools, servers and test cases that projects have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from django.contrib.auth import get_user_model
from django.core.handlers.base import BaseHandler
from django.db import connection
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from django_idempotency.decorators import idempotent
from testproject.models import LedgerEntry
from tests.support.callers import payment
from tests.support.servers import Server, running_server, running_uvicorn, unless_in_flight
from tests.support.threads import OtherThread, in_threads
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

MANY = 10


only_postgresql = pytest.mark.postgresql
DEPLOYMENTS = [
    pytest.param({"ATOMIC_REQUESTS": "1", "CONN_MAX_AGE": "60"}, id="ATOMIC_REQUESTS-CONN_MAX_AGE"),
    pytest.param({"WORKER_CLASS": "sync"}, id="sync_workers", marks=only_postgresql),
    pytest.param({"WORKER_CLASS": "gevent"}, id="gevent", marks=only_postgresql),
    pytest.param({"DJANGO_SETTINGS_MODULE": "tests.support.settings.pooled"}, id="psycopg_pool", marks=only_postgresql),
    pytest.param({"query": "isolation_level=3"}, id="REPEATABLE_READ", marks=only_postgresql),
    pytest.param({"query": "isolation_level=4"}, id="SERIALIZABLE", marks=only_postgresql),
    pytest.param({"pgbouncer": "1", "CONN_MAX_AGE": "60"}, id="PgBouncer", marks=pytest.mark.pgbouncer),
]


UVICORN = pytest.param({"uvicorn": "1"}, id="uvicorn")


def under(*deployments: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("deployed", deployments, indirect=True, scope="module")


@pytest.fixture(scope="module")
def deployed(request, server_database, tmp_path_factory) -> Iterator[Server]:
    environment = dict(request.param)
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


PATHS = ["/api/charges/", "/orders/", "/legacy/refunds/", "/legacy/api/refunds/"]


@pytest.mark.server
@under(*DEPLOYMENTS, UVICORN)
@pytest.mark.parametrize("path", PATHS)
def test_a_retry_gets_the_first_response(deployed, name, path):
    first = deployed.post(path, payment(name), key=name)
    again = deployed.post(path, payment(name), key=name)
    assert (first.status_code, first.content) == (201, again.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert deployed.ledger(name) == 1
    assert deployed.post(path, payment("other"), key=name).status_code == 422


@pytest.mark.server
@under(*DEPLOYMENTS, UVICORN)
def test_of_concurrent_duplicates_one_takes_effect(deployed, name):
    answers = in_threads(MANY, lambda _index: deployed.post("/api/charges/", payment(name), key=name))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert deployed.ledger(name) == 1


@pytest.mark.server
@under(*DEPLOYMENTS)
def test_concurrent_retries_after_a_kill_take_effect_once(deployed, name):
    with pytest.raises(httpx.TransportError):
        deployed.post("/api/charges/", payment(name), key=name, simulate={"kill": "after"})
    answers = in_threads(MANY, lambda _index: deployed.post("/api/charges/", payment(name), key=name))
    assert {answer.status_code for answer in answers} <= {201, 409}
    eventually(lambda: unless_in_flight(deployed.post("/api/charges/", payment(name), key=name)))
    assert deployed.ledger(name) == 1


@pytest.mark.server
@under(*DEPLOYMENTS)
def test_different_keys_all_take_effect_at_the_latest_when_retried(deployed, name):
    def pay(index: int) -> list[int]:
        answers = [deployed.post("/api/charges/", payment(name), key=f"{name}-{index}").status_code]
        eventually(lambda: answers[-1] == 201 or answers.append(_retried(deployed, name, index)))
        return answers

    answers = in_threads(MANY, pay)
    assert answers == [[201]] * MANY
    assert deployed.ledger(name) == MANY


def _retried(deployed: Server, name: str, index: int) -> int:
    return deployed.post("/api/charges/", payment(name), key=f"{name}-{index}").status_code


@pytest.mark.server
@pytest.mark.row_locks  # in lease mode the view's own transactions have the whole of SQLite to contend for
@under(UVICORN)
def test_an_async_view_takes_effect_once(deployed, name):
    answers = in_threads(MANY, lambda _index: deployed.post("/async/orders/", payment(name), key=name))
    assert {answer.status_code for answer in answers} <= {201, 409}
    again = deployed.post("/async/orders/", payment(name), key=name)
    assert {answer.content for answer in answers if answer.status_code == 201} == {again.content}
    assert again.headers["Idempotent-Replayed"] == "true"
    assert deployed.ledger(name) == 1
    assert deployed.post("/async/orders/", payment("other"), key=name).status_code == 422


@pytest.mark.server
@under(UVICORN)
def test_under_asgi_a_caller_that_hangs_up_can_come_back(deployed, name):
    with pytest.raises(httpx.TimeoutException):
        deployed.post("/async/orders/", payment(name), key=name, simulate={"delay_ms": 1000}, timeout=0.3)
    retry = eventually(lambda: unless_in_flight(deployed.post("/async/orders/", payment(name), key=name)))
    assert retry.status_code == 201
    assert deployed.ledger(name) == 1


@pytest.fixture
def carol():
    return get_user_model().objects.create_user("carol")


def ask(view: Callable[..., Any], user: Any, **headers: str) -> HttpResponse:
    """Call a view as Django's handler does."""
    request = RequestFactory().post("/", headers=headers)
    request.user = user
    return BaseHandler().make_view_atomic(view)(request)


@pytest.fixture
def tell() -> Callable[..., HttpResponse]:
    """A view, a new one for each test: Django marks views by attributes."""
    return lambda request: HttpResponse("in a transaction" if connection.in_atomic_block else "in none")


def test_a_request_without_a_key_is_in_djangos_transaction_or_none(atomic_requests, carol, tell):
    expected = b"in a transaction" if atomic_requests else b"in none"
    assert ask(tell, carol).content == expected
    assert ask(idempotent(tell), carol).content == expected


def test_a_keyed_request_is_in_the_one_transaction_of_its_mode(atomic_requests, carol, tell):
    assert ask(idempotent(tell), carol, idempotency_key="k").content == b"in a transaction"
    lease = ask(idempotent(mode="lease")(tell), carol, idempotency_key="other").content
    assert lease == (b"in a transaction" if atomic_requests else b"in none")


PATHS_OF_ENTRY_POINTS = ["/api/charges/", "/orders/", "/legacy/refunds/", "/legacy/api/refunds/", "/v1/charges"]


@pytest.fixture
def caller(client, carol):
    """POSTs with carol's token, and with faults."""
    from rest_framework.authtoken.models import Token

    Token.objects.create(user=carol, key="sk-token")

    def post(path: str, *, simulate: dict[str, Any] | None = None, **headers: str):
        bearer = path.startswith("/v1")
        headers["authorization"] = "Bearer sk_test_sk" if bearer else "Token sk-token"
        body = urlencode({"amount": 5, "currency": "eur", "description" if bearer else "reference": "r"})
        headers["X-Simulate"] = json.dumps(simulate or {})
        return client.post(path, body, "application/x-www-form-urlencoded", headers=headers)

    client.raise_request_exception = False
    with override_settings(SIMULATE=True):
        yield post


@pytest.mark.drf
@pytest.mark.parametrize("path", PATHS_OF_ENTRY_POINTS)
def test_every_entry_point_keeps_its_promises(atomic_requests, caller, path):
    assert caller(path, simulate={"raise": True}, idempotency_key="k").status_code == 500
    assert LedgerEntry.objects.count() == 0
    first = caller(path, idempotency_key="k")
    assert first.status_code in (200, 201)
    assert caller(path, idempotency_key="k").content == first.content
    assert LedgerEntry.objects.count() == 1
    assert caller(path).status_code == first.status_code
    assert LedgerEntry.objects.count() == 2
    assert caller(path, simulate={"raise": True}).status_code == 500
    assert LedgerEntry.objects.count() == (2 if atomic_requests else 3)


KILL = {
    "postgresql": "SELECT pg_terminate_backend(%s)",
    "mysql": "KILL %s",
}


@pytest.mark.row_locks
@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.usefixtures("transactional_db")
def test_a_server_that_hung_up_between_requests_is_not_noticed(carol, other_thread, mode):
    def pay(request):
        LedgerEntry.objects.create(user=request.user, amount=1, reference="r")
        return HttpResponse("paid")

    view = idempotent(mode=mode)(pay)
    for key, effects in [("k", 1), ("other", 2), ("k", 2)]:
        hang_up(other_thread)
        assert ask(view, carol, idempotency_key=key).content == b"paid"
        assert LedgerEntry.objects.count() == effects


def hang_up(other_thread: OtherThread) -> None:
    """The server ends this thread's connection; the client has not heard of it."""
    identity = {"postgresql": "pg_backend_pid()", "mysql": "connection_id()"}[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {identity}")
        (number,) = cursor.fetchone()
    other_thread(lambda: connection.cursor().execute(KILL[connection.vendor], [number]))
