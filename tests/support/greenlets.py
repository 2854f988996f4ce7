"""A process of gevent's in which one greenlet has locked a record that another one
waits for.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

from typing import Any  # noqa: E402

import django  # noqa: E402
import gevent  # noqa: E402
from gevent.event import Event  # noqa: E402


def main() -> None:
    django.setup()
    from django.db import transaction

    from django_idempotency import engine
    from django_idempotency.models import IdempotencyRecord
    from django_idempotency.values.outcomes import Claimed, Keep, StoredResponse
    from django_idempotency.values.policy import Policy
    from tests.support.callers import operation
    from tests.support.sql import value_of
    from tests.support.waiting import eventually

    policy = Policy()
    claimed, locked = Event(), Event()

    def run(key: str) -> None:
        outcome = engine.claim(operation(key), policy)
        assert isinstance(outcome, Claimed)
        if key == "waited-for":
            claimed.set()
            locked.wait()
        with engine.execution(outcome, policy) as execution:
            execution.verdict = Keep(StoredResponse(200))

    def wait() -> None:
        for key in ("one", "two", "three", "waited-for"):
            run(key)

    def hold() -> None:
        claimed.wait()
        with transaction.atomic():
            IdempotencyRecord.objects.select_for_update().get(key="waited-for")
            locked.set()
            eventually(somebody_waits_for_this)

    def somebody_waits_for_this() -> Any:
        return value_of(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() ="
            " ANY (pg_blocking_pids(pid))"
        )

    gevent.joinall([gevent.spawn(wait), gevent.spawn(hold)], raise_error=True)


if __name__ == "__main__":
    main()
