"""What else a process has to write, and what happens to its threads, costs no lease."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.core import mail
from django.db import connection, connections

from django_idempotency.engine import leases
from django_idempotency.engine.background import Worker
from django_idempotency.engine.leases import LeaseKeeper
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Lease
from tests.support.aliases import another_alias
from tests.support.callers import Gate, effects, entry_point, is_replay, paying, record
from tests.support.sql import run_sql
from tests.support.threads import OtherThread, in_threads
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.row_locks,
    pytest.mark.usefixtures("payer", "renewed_every_second"),
]

LEASE = 8
BEATS = leases.BEATS_PER_LEASE
MORE_THAN_THERE_IS = 2**47 - 2**16


@pytest.fixture
def renewed_every_second(monkeypatch):
    """As a lease of three seconds is, but a process that stalls for some seconds does
    not lose it.
    """
    monkeypatch.setattr(leases, "BEATS_PER_LEASE", LEASE)


@pytest.fixture
def outside_a_test_run(monkeypatch):
    """Counts are written, as they are not in a test run, or waited for as long as their
    row is locked.
    """
    monkeypatch.delattr(mail, "outbox")
    monkeypatch.setattr("django_idempotency.engine.background.PATIENCE", 60)


@contextmanager
def locked(statement: str) -> Iterator[None]:
    """Somebody else's transaction, with a lock, for as long as the block runs."""
    other = OtherThread()
    for each in ("BEGIN", statement):
        other(run_sql, each)
    try:
        yield
    finally:
        other.close()


def locking(key: str) -> str:
    table = IdempotencyRecord._meta.db_table
    return f"SELECT 1 FROM {table} WHERE id = '{record(key).pk}' FOR UPDATE"


def renewed(key: str = "k") -> None:
    """Wait until its lease was renewed, and that before it ran out."""
    before = record(key)
    after = eventually(
        lambda: (now := record(key)).locked_until > before.locked_until and now
    )
    assert after.locked_until - before.locked_until < timedelta(seconds=LEASE), (
        "it had run out"
    )


@pytest.mark.usefixtures("outside_a_test_run")
def test_leases_survive_a_locked_row_whose_replays_are_counted():
    assert entry_point(paying)("done").status_code == 201
    with Gate().running(mode=Lease(seconds=LEASE)), locked(locking("done")):
        assert is_replay(entry_point(paying)("done"))
        renewed()
        renewed()


@pytest.mark.usefixtures("outside_a_test_run")
def test_a_replay_is_sent_although_threads_can_not_be_started():
    assert entry_point(paying)("done").status_code == 201
    with without_new_threads():
        assert is_replay(entry_point(paying)("done"))


@pytest.mark.postgresql
@pytest.mark.parametrize("owns_both", [True, False], ids=["owned", "asked for"])
def test_a_hanging_connection_of_a_long_lease_leaves_short_ones_alive(proxy, owns_both):
    """The thread that keeps the leases waits no longer for a connection than the
    shortest lease allows.
    """
    direct = {"HOST": proxy.upstream[0], "PORT": proxy.upstream[1]}
    long, short = {"mode": Lease(seconds=60 * LEASE)}, {"mode": Lease(seconds=LEASE)}
    gates = Gate(), Gate()
    connection.ensure_connection()  # so that the newest one is that of the leases
    with (
        another_alias("direct", **direct) as alias,
        gates[0].running_with("long", **long, using=None if owns_both else alias),
        gates[1].running(**short),
    ):
        assert entry_point(paying, **long)("long").status_code == 409
        renewed()
        proxy.swallow()
        given_up = time.monotonic() + LEASE + 3
        while time.monotonic() < given_up:
            assert entry_point(paying, **short, using=alias)().status_code == 409
            time.sleep(0.1)


@pytest.mark.postgresql
@pytest.mark.psycopg_pool
def test_leases_survive_a_pool_that_the_views_use_up(pooled):
    first, second = Gate(), Gate()
    policy = {"mode": Lease(seconds=LEASE), "using": pooled}
    with first.running(**policy):
        renewed()
        with second.running_with("other", **policy):
            renewed()
            renewed("other")


@pytest.fixture
def pooled(payer):
    """An alias of the default database, with a pool of two connections."""
    options = {
        **connection.settings_dict["OPTIONS"],
        "pool": {"min_size": 0, "max_size": 2, "timeout": 30},
    }
    with another_alias("pooled", OPTIONS=options, CONN_MAX_AGE=0) as alias:
        yield alias
        connections[alias].close()
        connections[alias].close_pool()


@pytest.mark.postgresql
def test_leases_survive_a_connection_that_leads_nowhere(proxy):
    """Nobody says that it is broken: what is sent is accepted, and nothing comes
    back.
    """
    connection.ensure_connection()  # so that the newest one is that of the leases
    with Gate().running(mode=Lease(seconds=LEASE)):
        renewed()
        proxy.swallow()
        renewed()
        renewed()


@pytest.mark.postgresql
def test_a_locked_row_does_not_delay_other_leases():
    policy = {"mode": Lease(seconds=LEASE)}
    other = Gate()
    with (
        Gate().running(**policy),
        other.running_with("other", **policy),
        locked(locking("k")),
    ):
        renewed("other")
        renewed("other")


def test_two_heartbeats_may_fail_before_a_lease_runs_out(monkeypatch):
    """It is renewed when two thirds of it are left, unless the process stalls."""
    monkeypatch.setattr(leases, "BEATS_PER_LEASE", BEATS)

    def in_time():
        before = record()
        after = eventually(
            lambda: (now := record()).locked_until > before.locked_until and now
        )
        return after.locked_until - before.locked_until < timedelta(seconds=3.5)

    with Gate().running(mode=Lease(seconds=6)):
        eventually(in_time)


class Treacherous(logging.Filter):
    def filter(self, record: Any) -> bool:
        raise ValueError("a filter with a fault")


@pytest.fixture
def logging_that_fails():
    logger, fault = logging.getLogger("django_idempotency"), Treacherous()
    logger.addFilter(fault)
    yield
    logger.removeFilter(fault)


@pytest.mark.postgresql
@pytest.mark.usefixtures("logging_that_fails")
def test_leases_survive_logging_that_fails(proxy):
    with Gate().running(mode=Lease(seconds=LEASE)):
        wires = len(proxy.wires)
        proxy.go_away()
        refused = proxy.refused
        eventually(lambda: proxy.refused > refused)
        proxy.come_back()
        eventually(lambda: len(proxy.wires) > wires)
        renewed()


def ours() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("django-idempotency")
    ]


def fail(_worker: object) -> None:
    """As an exception would that nobody expected."""
    raise SystemExit


def end_the_thread_of_leases(monkeypatch):
    (ended,) = [thread for thread in ours() if thread.name.endswith("leases")]
    with monkeypatch.context() as patch:
        patch.setattr(LeaseKeeper, "work", fail)
        ended.join(60)
    assert not ended.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_leases_survive_the_end_of_their_thread(monkeypatch):
    with Gate().running(mode=Lease(seconds=LEASE)):
        renewed()
        end_the_thread_of_leases(monkeypatch)
        renewed()
        renewed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_next_claim_restarts_a_dead_thread(monkeypatch):
    monkeypatch.setattr(Worker, "_leave_to_a_successor", lambda worker: None)
    policy = {"mode": Lease(seconds=LEASE)}
    with Gate().running(**policy):
        end_the_thread_of_leases(monkeypatch)
        other = Gate()
        with other.running_with("other", **policy):
            renewed("other")
            renewed("other")


@contextmanager
def without_new_threads() -> Iterator[None]:
    before = threading.stack_size(MORE_THAN_THERE_IS)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_without_a_thread_for_leases_nothing_is_run():
    ran = []

    def view(request: Any) -> Any:
        ran.append(True)
        return paying(request)

    send = entry_point(view, mode=Lease(seconds=LEASE))
    with without_new_threads():
        answer = send()
    assert (answer.status_code, ran, record()) == (503, [], None)
    assert (send().status_code, ran, effects()) == (201, [True], 1)


def test_many_leases_are_renewed_by_one_thread_and_one_connection():
    held = threading.Barrier(4)  # the thread ends with the last lease that it keeps

    def hold(number: int) -> Any:
        with Gate().running_with(str(number), mode=Lease(seconds=LEASE)):
            held.wait(60)
            renewed(str(number))
            found = {thread.ident for thread in ours()}
            held.wait(60)
            return found

    threads = set.union(*in_threads(4, hold))
    assert len(threads) == 1
