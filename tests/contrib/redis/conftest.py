"""Fixtures of the tests of the Redis store."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.redis.client import RedisOptions, connection
from tests.contrib.redis.records import use
from tests.support.callers import stop_heartbeat
from tests.support.redis_servers import running_node


@pytest.fixture(autouse=True)
def quiet():
    """Afterwards, no thread is at work, and no socket is open: redis-py's clients are
    garbage in cycles, and a test in which that is collected would fail.
    """
    made, make = [], RedisOptions.make_client
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(
            RedisOptions,
            "make_client",
            lambda options: made.append(make(options)) or made[-1],
        )
        yield
    stop_heartbeat()
    for client in made:
        client.close()
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
