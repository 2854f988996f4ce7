"""Cleaning up: what it deletes, what it leaves, and in which order."""

from __future__ import annotations

import pytest

from django_idempotency.maintenance import (
    Refusal,
    allow_retry,
    cleanup,
    drop_bodies,
    reap,
)
from django_idempotency.maintenance.stats import stats
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores.database import ahead
from tests.support.callers import entry_point, is_replay, paying, record, row, shift
from tests.support.maintained import (
    DAY,
    HOLD,
    HOUR,
    dead,
    done,
    fill,
    keys,
    one_batch,
    row_locks,
    sums,
)
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("payer")


def test_only_what_is_past_its_audit_time_is_deleted():
    done("purged")
    done("in-retention", expires_at=HOUR)
    done("in-audit", expires_at=-HOUR, purge_at=HOUR)
    dead("processing")
    shift("processing", expires_at=-DAY, purge_at=-DAY)
    dead("started", mode="lease")
    IdempotencyRecord.objects.filter(key="started").update(
        status=Status.STARTED, expires_at=ahead(-DAY), purge_at=ahead(-DAY)
    )
    assert cleanup().rows == 1
    assert keys() == {"in-retention", "in-audit", "processing", "started"}


def test_failures_are_deleted_but_keys_on_hold_are_kept():
    dead("retry", mode="lease")
    dead("hold", **HOLD)
    reap()
    for key in ("retry", "hold"):
        shift(key, expires_at=-2, purge_at=-1)
    assert cleanup().rows == 1
    assert entry_point(paying, **HOLD)("hold").status_code == 409
    assert not isinstance(allow_retry(record("hold").pk), Refusal)
    assert cleanup().rows == 1


def test_cleanup_goes_by_batches_oldest_first():
    fill(10, purge_at=-1000)
    first = one_batch(cleanup, batch=4)
    assert (first.rows, first.finished) == (4, False)
    assert 995 <= first.lag <= 1100
    assert keys() == {f"k{number}" for number in range(4, 10)}
    assert [
        (swept.rows, swept.finished) for swept in sums(cleanup, batch=4, pause=0)
    ] == [(4, False), (6, True)]
    assert stats()["lag"] == 0


def test_a_cleanup_pauses_between_batches(settings):
    fill(3, purge_at=-1000)
    settings.IDEMPOTENCY = {"SWEEP_BATCH": 1, "SWEEP_PAUSE": 0.05}
    assert cleanup().seconds >= 3 * 0.05


def test_each_batch_is_a_transaction_of_its_own(other_thread):
    fill(4, purge_at=-1000)
    left = []
    cleanup(
        batch=2,
        pause=0,
        go_on=lambda _swept: (
            left.append(other_thread(IdempotencyRecord.objects.count)) or True
        ),
    )
    assert left == [2, 0]


@row_locks
def test_two_at_once_delete_everything_once():
    fill(100, purge_at=-1000)
    deleted = sum(
        one.rows for one in in_threads(3, lambda _: cleanup(batch=7, pause=0))
    )
    # On MariaDB one can pass over a row that another has locked and, as a deadlock's
    # victim, lets go again; each of them a batch at most.
    assert 100 - 3 * 7 <= deleted <= 100
    assert deleted + cleanup().rows == 100
    assert keys() == set()


def test_expired_bodies_are_dropped_and_records_stay():
    done("expired", expires_at=-HOUR, purge_at=DAY)
    done("in-retention", expires_at=HOUR, purge_at=DAY)
    done("without-audit")
    assert drop_bodies().rows == 1
    assert drop_bodies().rows == 0
    expired = row("expired")
    assert (expired["response_status"], expired["response_body"]) == (201, None)
    assert expired["response_headers"] is not None
    assert row("in-retention")["response_body"]
    again = entry_point(paying)("in-retention")
    assert is_replay(again)
    assert again.content
