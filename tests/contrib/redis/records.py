"""What the tests of the Redis store share: its settings, policies, operations,
claims.
"""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

import redis

from django_idempotency import engine
from django_idempotency.contrib.testing.stores import RESPONSE
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Keep, Operation
from django_idempotency.values.policy import Lease, Policy

BACKEND = "django_idempotency.contrib.redis.RedisStore"
RETRY = Policy(mode=Lease(seconds=10), store="redis", retention=100)
HOLD = RETRY.derive(mode=Lease(seconds=10, on_crash="hold"))
LEASE = Policy(mode=Lease(seconds=300), store="redis")


def use(settings, url=None, **options):
    """Keep records in the Redis at ``url``, under a prefix of their own, with patience
    for a busy machine.
    """
    options = {
        "prefix": f"test-{uuid4().hex}:",
        "timeout": 30.0,
        **({"url": url} if url else {}),
        **options,
    }
    settings.IDEMPOTENCY = {
        "STORES": {"redis": {"BACKEND": BACKEND, "OPTIONS": options}}
    }


def connections(client: redis.Redis) -> int:
    """How many the server of ``client`` has taken so far."""
    return client.info("stats")["total_connections_received"]


def operation() -> Operation:
    return Operation("test", str(uuid4()), b"1" * 32, "POST", "/")


def claimed(policy: Policy = RETRY) -> Claimed:
    claim = store_for(policy).claim(operation(), uuid4())
    assert isinstance(claim, Claimed)
    return claim


def was_granted() -> bool:
    """Whether a claim was; not if the server, or its replica, was late."""
    with suppress(StoreUnavailable):
        return isinstance(claimed(), Claimed)
    return False


def done(policy: Policy = RETRY, one: Operation | None = None) -> Claimed:
    claim = engine.claim(one or operation(), policy)
    assert isinstance(claim, Claimed)
    with engine.execution(claim, policy) as execution:
        execution.verdict = Keep(RESPONSE)
    return claim
