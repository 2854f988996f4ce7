"""Claims that had to wait for as long as a conversion took go on behind it: nobody is
refused.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import transaction

from django_idempotency import engine
from django_idempotency.contrib.partitions.conversion import enable_plan
from django_idempotency.values.outcomes import Claimed, InFlight
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import operation
from tests.support.sql import run_sql
from tests.support.threads import in_threads
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.plain_table,
    pytest.mark.usefixtures("table"),
]

PATIENCE = 0.1
LEASED = Policy(mode=Lease())


def divide():
    """As ``enable`` does, in the transaction that is open."""
    for statement in enable_plan():
        if statement not in ("BEGIN", "COMMIT"):
            run_sql(statement)


@pytest.mark.parametrize("earlier", [0, 2], ids=["new-connection", "used-connection"])
@pytest.mark.parametrize(("key", "outcome"), [("known", InFlight), ("new", Claimed)])
def test_a_claim_that_waited_for_a_conversion_goes_on(
    other_thread, monkeypatch, earlier, key, outcome
):
    monkeypatch.setattr(engine.waiting, "PATIENCE", PATIENCE)
    assert isinstance(engine.claim(operation("known"), LEASED), Claimed)
    ready, converts = [], []

    def caller(_number):
        for number in range(earlier):
            engine.claim(operation(f"earlier-{number}"), LEASED)
        ready.append(True)
        eventually(lambda: converts)
        return engine.claim(operation(key), LEASED)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_threads, 1, caller)
        eventually(lambda: ready)
        block = transaction.atomic()
        other_thread(block.__enter__)
        other_thread(divide)
        converts.append(True)
        eventually(someone_waits_for_a_lock)
        since = time.monotonic()
        eventually(lambda: time.monotonic() > since + PATIENCE)
        other_thread(block.__exit__, None, None, None)
        assert isinstance(waiting.result(60)[0], outcome)
