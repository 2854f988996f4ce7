"""Lease mode where tenants have a schema each: whatever is written later goes to the
schema of the claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from django.http import HttpResponse

from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic, Lease
from tests.support.aliases import another_alias
from tests.support.callers import Gate, entry_point, is_replay
from tests.support.sql import run_sql
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer"),
]

TABLE = IdempotencyRecord._meta.db_table
TENANT = "Tenant one"
LEASE = 3


def by_search_path(alias: str) -> None:
    run_sql(f'SET search_path = "{TENANT}", public', using=alias)


def by_django_tenants(alias: str) -> None:
    connections[alias].set_schema(TENANT)  # type: ignore[attr-defined]


SWITCHES = [
    pytest.param(("django.db.backends.postgresql", by_search_path), id="search_path"),
    pytest.param(
        ("django_tenants.postgresql_backend", by_django_tenants),
        id="django-tenants",
        marks=pytest.mark.django_tenants,
    ),
]


@pytest.fixture(params=SWITCHES)
def tenants(request, payer) -> Iterator[Any]:
    """An alias of the default database, and what has this thread's connection to it
    look into the tenant's schema.
    """
    engine, switch = request.param
    run_sql(f'CREATE SCHEMA "{TENANT}"')
    run_sql(f'CREATE TABLE "{TENANT}".{TABLE} (LIKE public.{TABLE} INCLUDING ALL)')
    with another_alias("tenants", ENGINE=engine, CONN_MAX_AGE=None) as alias:
        yield alias, switch
    run_sql(f'DROP SCHEMA "{TENANT}" CASCADE')


def test_tenants_with_a_schema_each_have_the_locks_of_their_claims_to_themselves(
    tenants,
):
    alias, switch = tenants
    policy = {"mode": Atomic(claim="lock"), "using": alias}
    # this session has the function planned for the other schema
    entry_point(answering, **policy)("opened")
    switch(alias)
    with Gate().running(mode=Atomic(claim="lock")):
        assert entry_point(answering, **policy)(body=b"{}").status_code == 201
    assert is_replay(entry_point(answering, **policy)(body=b"{}"))
    assert row("response_status") == 201


@pytest.mark.parametrize("kind", ["record", "lock"])
def test_the_response_of_a_view_that_changes_its_schema_is_not_stored_there(
    tenants, kind
):
    alias, switch = tenants

    def view(_request: Any) -> HttpResponse:
        connections[alias].ensure_connection()
        switch(alias)
        return HttpResponse("ours", status=201)

    with pytest.raises(ImproperlyConfigured, match="search_path"):
        entry_point(view, mode=Atomic(claim=kind), using=alias)()
    assert row("count(*)") == 0


def answering(_request: Any) -> HttpResponse:
    return HttpResponse("done", status=201)


def row(column: str) -> Any:
    found = run_sql(f'SELECT {column} FROM "{TENANT}".{TABLE}')
    return found[0][0] if found else None


def in_the_view(tenants: Any) -> AbstractContextManager[Future[Any]]:
    """A view runs for the tenant, in a thread, until the block is left; its answer is a
    future.
    """
    alias, switch = tenants
    return Gate(partial(switch, alias)).running(mode=Lease(seconds=LEASE), using=alias)


def never(_request: Any) -> HttpResponse:
    raise AssertionError("it ran twice")


def test_a_lease_is_renewed_in_the_schema_of_its_claim(tenants):
    with in_the_view(tenants):
        before = row("locked_until")
        eventually(lambda: row("locked_until") > before)
        alias, switch = tenants
        switch(alias)
        assert (
            entry_point(never, mode=Lease(seconds=LEASE), using=alias)().status_code
            == 409
        )


def test_a_late_completion_goes_to_the_schema_of_its_claim(proxy, tenants):
    with in_the_view(tenants) as answer:
        connection.close()
        proxy.go_away()
    assert answer.result().status_code == 201
    proxy.come_back()
    assert eventually(lambda: row("status") == "completed")


def test_replays_are_counted_in_the_schema_of_the_record(tenants, monkeypatch):
    monkeypatch.delattr(mail, "outbox")
    alias, switch = tenants
    with in_the_view(tenants):
        pass
    switch(alias)
    assert is_replay(entry_point(never, mode=Lease(seconds=LEASE), using=alias)())
    assert eventually(lambda: row("replays")) == 1
