"""Fixtures of the tests of the Redis store."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.redis.client import connection
from tests.contrib.redis.records import use
from tests.support.callers import stop_heartbeat
from tests.support.redis_servers import running_node


@pytest.fixture(autouse=True)
def quiet():
    yield
    stop_heartbeat()
    connection.cache_clear()


@pytest.fixture
def on_redis(settings, redis_url):
    use(settings, redis_url)


@pytest.fixture
def node(settings, tmp_path):
    """A server of the test's own."""
    with running_node(tmp_path) as running:
        use(settings, running.url, prefix="idempotency:")
        yield running
