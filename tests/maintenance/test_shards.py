"""Maintenance of a table whose rows are on several servers: no statement locks records
of more than one shard.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest

from django_idempotency.maintenance import cleanup, drop_bodies, erase, reap
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from django_idempotency.values.policy import Policy
from tests.support.callers import Gate, claim, record
from tests.support.maintained import HOUR, TABLE, dead, fill, keys, postgresql
from tests.support.shard_locks import refused_across_shards, shard_of
from tests.support.sql import run_sql

pytestmark = [
    postgresql,
    pytest.mark.plain_table,
    pytest.mark.usefixtures("payer", "short_watch"),
]
MANY = 24


@pytest.fixture
def locked(payer, monkeypatch):
    """The shards of each locking statement; one that names several is refused, as by
    Citus.
    """
    with refused_across_shards(monkeypatch) as locked:
        yield locked


def shards():
    return {
        shard_of(id) for id in IdempotencyRecord.objects.values_list("pk", flat=True)
    }


def test_a_reaper_goes_shard_by_shard(locked):
    for number in range(MANY):
        dead(f"k{number}", mode="lease")
    reached = shards()
    assert len(reached) > 1
    assert (reaped := reap(batch=MANY // 2)).done["failed"] == MANY
    assert reaped.finished
    assert set().union(*locked) == reached
    assert keys(status=Status.FAILED) == {f"k{number}" for number in range(MANY)}


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_live_owner_of_any_shard_is_passed_over(locked, batch):
    """However small the batch: it is not looked at for ever."""
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(Gate().running_with(f"live{number}"))
        for number in range(5):
            dead(f"dead{number}")
        assert reap(older_than=-HOUR, batch=batch).done["failed"] == 5
        assert keys(status=Status.PROCESSING) == {"live0", "live1", "live2"}
    assert keys(status=Status.COMPLETED) == {"live0", "live1", "live2"}


def test_a_bad_record_of_a_shard_is_isolated(locked):
    for number in range(9):
        dead(f"k{number}", mode="lease")
    bad = record("k4").pk
    run_sql(
        f"ALTER TABLE {TABLE} ADD CONSTRAINT no_k4 CHECK (key <> 'k4' OR status <>"
        " 'failed') NOT VALID"
    )
    try:
        reaped = reap(batch=4)
    finally:
        run_sql(f"ALTER TABLE {TABLE} DROP CONSTRAINT no_k4")
    assert (reaped.done["failed"], list(reaped.bad)) == (8, [str(bad)])


@pytest.mark.parametrize("batch", [7, 100])
def test_a_cleanup_goes_shard_by_shard_and_passes_over_what_is_locked(
    locked, batch, other_thread
):
    fill(MANY, purge_at=-HOUR)
    reached = shards()
    first = IdempotencyRecord.objects.order_by("purge_at").values_list("pk", flat=True)[
        0
    ]
    with locked_elsewhere(other_thread, first):
        assert cleanup(batch=batch, pause=0).rows == MANY - 1
    assert set().union(*locked) == reached
    assert keys() == {"k0"}
    assert cleanup(batch=batch, pause=0).rows == 1


@contextmanager
def locked_elsewhere(thread, id):
    lock = store_for(Policy()).try_lock(id)
    thread(lock.__enter__)
    try:
        yield
    finally:
        thread(lock.__exit__, None, None, None)


def test_bodies_are_dropped_and_scopes_erased_shard_by_shard(locked):
    fill(MANY, purge_at=HOUR)
    IdempotencyRecord.objects.update(expires_at=ahead(-HOUR), response_body=b"body")
    assert drop_bodies(batch=7, pause=0).rows == MANY
    claim("live", policy=Policy(mode="lease"))
    assert erase("s").rows == MANY
    assert keys() == {"live"}
