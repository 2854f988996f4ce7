"""E056: a pool that leaves the server no connection for a process's own ones."""

from __future__ import annotations

import psycopg_pool  # noqa: F401 (Django's pool needs it, and without it there is nothing to test)
import pytest
from django.db import connection

from django_idempotency.checks.databases import check_connections

pytestmark = [pytest.mark.postgresql, pytest.mark.django_db]


@pytest.fixture
def pool(monkeypatch, settings):
    settings.ROOT_URLCONF = ()  # without the form of the test project, whose callers wait

    def of(size):
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"pool": size and {"max_size": size}})

    return of


def found():
    return [message.id for message in check_connections(None, databases=["default"])]


def limit():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        )
        return cursor.fetchone()[0]


@pytest.mark.parametrize(("spare", "messages"), [(2, []), (1, ["django_idempotency.E056"])])
def test_a_pool_leaves_two_connections_of_the_servers(pool, spare, messages):
    pool(limit() - spare)
    assert found() == messages


@pytest.mark.parametrize(("limited", "messages"), [(6, []), (5, ["django_idempotency.E056"])])
def test_a_pool_leaves_two_connections_of_the_databases(pool, limited, messages):
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER DATABASE {connection.ops.quote_name(connection.settings_dict['NAME'])} CONNECTION LIMIT {limited}"
        )
    pool(4)
    assert found() == messages


@pytest.mark.parametrize(("spare", "messages"), [(3, []), (2, ["django_idempotency.E056"])])
def test_callers_that_wait_share_one_more(pool, settings, spare, messages):
    settings.IDEMPOTENCY = {"ON_CONFLICT": "wait"}
    pool(limit() - spare)
    assert found() == messages


@pytest.mark.parametrize("size", [False, None])
def test_without_a_pool_nothing_is_said(pool, size):
    pool(size)
    assert found() == []
