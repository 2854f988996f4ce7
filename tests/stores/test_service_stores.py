"""The test project's server with its records in Redis, or with a cache in front."""

from __future__ import annotations

from uuid import uuid4

import pytest
import redis

from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.redis, pytest.mark.slow]
PAYOUT = {"amount": 5, "currency": "EUR"}


@pytest.mark.parametrize(
    ("store", "path"), [("redis", "/api/payouts/"), ("cached", "/api/charges/")]
)
def test_a_retry_is_replayed_from_where_the_record_is(
    start_server, redis_url, store, path
):
    def kept():
        return set(redis.Redis.from_url(redis_url).scan_iter("*idempotency:*"))

    before = kept()
    server = start_server(STORE=store, REDIS_URL=redis_url)
    key, reference = str(uuid4()), str(uuid4())
    first, again = (
        server.post(path, PAYOUT | {"reference": reference}, key=key) for _ in range(2)
    )
    assert (first.status_code, again.content) == (201, first.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert server.ledger(reference) == 1

    def kept_after_a_replay():
        """A cache that was slow is left alone for some seconds; a later replay is kept
        again.
        """
        return kept() - before or (
            server.post(path, PAYOUT | {"reference": reference}, key=key)
            and kept() - before
        )

    assert len(eventually(kept_after_a_replay)) == 1
