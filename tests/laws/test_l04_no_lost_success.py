"""L4: in atomic mode no effects commit without their stored response."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction

from django_idempotency import engine
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import DatabaseStore
from tests.support.callers import effects, entry_point, is_replay, paying, record
from tests.support.owner_process import AFTER_EFFECT, holding
from tests.support.proxy import Cut
from tests.support.views_of_laws import completed, postgresql, row_locks
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("payer")


@postgresql
def test_l4_a_response_lost_at_commit_is_found_again(proxy, caplog):
    def view(request):
        proxy.cut = Cut.AFTER_COMMIT
        return paying(request)

    first = entry_point(view)()
    assert (first.status_code, is_replay(first), effects(), proxy.cuts) == (
        201,
        False,
        1,
        1,
    )
    assert entry_point(view)().content == first.content
    assert effects() == 1
    (told,) = caplog.records
    assert (told.levelname, told.event, told.attempt) == (
        "ERROR",
        "committed_with_error",
        1,
    )
    assert told.record_id == str(record().id) in told.getMessage()
    assert told.exc_info


@postgresql
@pytest.mark.not_on_citus
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"], indirect=True)
def test_l4_the_response_is_found_once_the_lock_is_released(
    proxy, lock, monkeypatch, other_thread
):
    """As the server does that is not done with the transaction."""
    has_locked, let_go, sleep = threading.Event(), threading.Event(), time.sleep
    lockers, read = ThreadPoolExecutor(1), DatabaseStore.read_after_commit

    def read_once_locked(store, claim):
        assert has_locked.wait(60)
        return read(store, claim)

    def let_go_and_sleep(seconds):
        let_go.set()
        sleep(seconds)

    def lock_the_record():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                f"SELECT 1 FROM {IdempotencyRecord._meta.db_table} FOR UPDATE"
            )
            has_locked.set()
            assert let_go.wait(60)
        connection.close()

    def view(request):
        locked.append(lockers.submit(lock_the_record))
        eventually(lambda: other_thread(someone_waits_for_a_lock))
        proxy.cut = Cut.AFTER_COMMIT
        return paying(request)

    locked = []
    monkeypatch.setattr(DatabaseStore, "read_after_commit", read_once_locked)
    monkeypatch.setattr(engine.atomic_runs, "PATIENCE", 60)
    monkeypatch.setattr(engine.waiting.time, "sleep", let_go_and_sleep)
    first = entry_point(view)()
    assert (first.status_code, is_replay(first), effects(), proxy.cuts) == (
        201,
        False,
        1,
        1,
    )
    locked[0].result(60)
    lockers.shutdown()


class Clock:
    """In the place of ``time``: sleeping takes no time."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@postgresql
def test_l4_a_new_key_is_unsafe_while_a_commit_is_in_doubt(proxy, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(engine.atomic_runs, "time", clock)

    def view(request):
        proxy.cut, proxy.away_once_cut = Cut.AFTER_COMMIT, True
        return paying(request)

    unsure = entry_point(view)()
    assert (unsure.status_code, unsure.headers["Retry-After"] in ("1", "2")) == (
        503,
        True,
    )
    assert b'"safe_new_key": false' in unsure.content
    assert 5 <= clock.now < 5.1
    proxy.come_back()
    assert is_replay(entry_point(view)())
    assert effects() == 1


def test_l4_effects_whose_response_cannot_be_stored_are_not_committed():
    def view(request):
        IdempotencyRecord.objects.update(token=uuid4())
        return paying(request)

    with pytest.raises(ImproperlyConfigured, match="or changed the record"):
        entry_point(view)()
    assert effects() == 0


@row_locks
def test_l4_a_process_killed_after_its_effect_commits_nothing():
    with holding() as owner:
        owner.go_on()
        assert owner.says() == AFTER_EFFECT
        owner.kill()
    assert effects() == 0
    assert eventually(lambda: completed(entry_point(paying)())).content
    assert effects() == 1
