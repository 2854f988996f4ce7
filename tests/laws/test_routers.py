"""Tenants with a database each, chosen by a router: a run's record and effects are in
one database, to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from itertools import cycle
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connection
from django.http import HttpResponse

from django_idempotency.messages import AlreadyDone, Consumer, Done, Message
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.policy import Atomic
from tests.support.aliases import another_alias
from tests.support.callers import entry_point, is_replay, stop_heartbeat
from tests.support.databases import create_database, drop_database
from tests.support.private_servers import free_port
from tests.support.sql import run_sql, value_of

pytestmark = [pytest.mark.row_locks, pytest.mark.usefixtures("routed")]

TENANTS = ("acme", "globex")
KINDS = [
    pytest.param("atomic", id="record"),
    pytest.param(Atomic(claim="lock"), id="lock", marks=pytest.mark.postgresql),
    pytest.param("lease", id="lease"),
]
tenant: ContextVar[str] = ContextVar("tenant", default="acme")


class ByTenant:
    """A router that asks for the tenant of the current request."""

    def db_for_write(self, model: Any, **_hints: Any) -> str:
        return tenant.get()


class Fickle:
    """A router that chooses another database each time it is asked."""

    def __init__(self) -> None:
        self.choices = cycle(TENANTS)

    def db_for_write(self, model: Any, **_hints: Any) -> str:
        return next(self.choices)


@pytest.fixture(scope="module")
def databases(django_db_setup, django_db_blocker, tmp_path_factory) -> Iterator[None]:
    """An alias for each tenant, of a database with the package's tables and one for
    effects.
    """
    with django_db_blocker.unblock(), ExitStack() as stack:
        for alias in TENANTS:
            name = f"{connection.settings_dict['NAME']}_{alias}"
            create_database(name, tmp_path_factory.mktemp("database"))
            stack.callback(drop_database, name)
            stack.enter_context(another_alias(alias, NAME=name))
            call_command("migrate", "django_idempotency", database=alias, verbosity=0)
            run_sql("CREATE TABLE effect (reference varchar(100))", using=alias)
        yield


@pytest.fixture
def routed(databases, settings, transactional_db) -> Iterator[None]:
    settings.DATABASE_ROUTERS = [ByTenant()]
    before = tenant.set("acme")
    yield
    tenant.reset(before)
    stop_heartbeat()
    for alias in TENANTS:
        IdempotencyRecord.objects.using(alias).all().delete()


def pay_into(alias: str, reference: str) -> None:
    run_sql("INSERT INTO effect VALUES (%s)", [reference], alias)


def effects(reference: str) -> list[int]:
    """How many effects have committed in the database of each tenant."""
    count = "SELECT count(*) FROM effect WHERE reference = %s"
    return [value_of(count, [reference], alias) for alias in TENANTS]


def records(**wanted: Any) -> list[int]:
    return [
        IdempotencyRecord.objects.using(alias).filter(**wanted).count()
        for alias in TENANTS
    ]


def paying(request: Any) -> HttpResponse:
    pay_into(request.idempotency.database, request.idempotency.key)
    return HttpResponse(request.idempotency.database, status=201)


@pytest.mark.parametrize("mode", KINDS)
def test_each_tenants_records_and_effects_are_in_its_own_database(mode, reference):
    pay = entry_point(paying, mode=mode)
    for alias in TENANTS:
        tenant.set(alias)
        first, again = pay(reference), pay(reference)
        assert (first.content, is_replay(first)) == (alias.encode(), False)
        assert (again.content, is_replay(again)) == (alias.encode(), True)
    assert (
        effects(reference) == records(key=reference, status=Status.COMPLETED) == [1, 1]
    )


@pytest.mark.parametrize("mode", KINDS)
def test_a_run_ends_in_the_database_of_its_claim_though_the_router_chooses_another(
    mode, reference
):
    def view(request: Any) -> HttpResponse:
        tenant.set("globex")
        request.idempotency.renew()
        return paying(request)

    pay = entry_point(view, mode=mode)
    assert pay(reference).content == b"acme"
    assert (
        effects(reference) == records(key=reference, status=Status.COMPLETED) == [1, 0]
    )
    tenant.set("acme")
    assert is_replay(pay(reference))


@pytest.mark.parametrize("mode", KINDS)
def test_a_run_keeps_its_database_however_often_the_router_changes_its_choice(
    mode, reference, settings
):
    settings.DATABASE_ROUTERS = [Fickle()]
    assert entry_point(paying, mode=mode)(reference).status_code == 201
    assert sorted(effects(reference)) == [0, 1]
    assert (
        effects(reference)
        == records(key=reference)
        == records(key=reference, status=Status.COMPLETED)
    )


def test_an_owner_that_lost_its_claim_gets_the_response_from_the_database_of_its_claim(
    reference,
):
    ended = {"token": None, "locked_at": None, "locked_until": None}
    response = {
        "status": Status.COMPLETED,
        "response_status": 202,
        "response_headers": [],
        "response_body": b"theirs",
    }

    def view(request: Any) -> HttpResponse:
        IdempotencyRecord.objects.using("acme").filter(key=reference).update(
            **ended, **response
        )
        tenant.set("globex")
        return HttpResponse("ours")

    answer = entry_point(view, mode="lease")(reference)
    assert (answer.status_code, answer.content, is_replay(answer)) == (
        202,
        b"theirs",
        True,
    )


@pytest.mark.postgresql
def test_a_batch_is_claimed_and_run_in_one_database_whatever_the_router_chooses(
    settings,
):
    def handle(message: Message, context: Any) -> None:
        pay_into(context.database, message.id)

    settings.DATABASE_ROUTERS = [Fickle()]
    consumer = Consumer("payments", handle)
    ids = [uuid4().hex for _ in range(4)]
    deliveries = consumer.consume_many(
        [Message("queue", id) for id in ids], in_order=True
    )
    assert {type(delivery) for delivery in deliveries} == {Done}
    for id in ids:
        assert sorted(effects(id)) == [0, 1]
        assert effects(id) == records(key=id, status=Status.COMPLETED)


@pytest.mark.postgresql
def test_a_batch_is_in_the_database_that_the_router_chooses_when_it_is_consumed():
    def handle(message: Message, context: Any) -> None:
        pay_into(context.database, message.id)

    tenant.set("globex")
    consumer = Consumer("payments", handle)
    messages = [Message("queue", uuid4().hex) for _ in range(3)]
    assert {type(delivery) for delivery in consumer.consume_many(messages)} == {Done}
    assert [effects(message.id) for message in messages] == [[0, 1]] * 3
    assert {type(consumer.consume(message)) for message in messages} == {AlreadyDone}


@pytest.mark.parametrize("mode", KINDS)
def test_tenants_are_served_while_another_tenants_database_is_down(mode, reference):
    pay = entry_point(paying, mode=mode)
    with another_alias("initech", HOST="127.0.0.1", PORT=str(free_port())):
        statuses = []
        for alias in ("acme", "initech", "globex"):
            tenant.set(alias)
            answer = pay(reference)
            statuses.append(answer.status_code)
            assert ("Retry-After" in answer.headers) == (alias == "initech")
    assert statuses == [201, 503, 201]
    assert effects(reference) == [1, 1]
