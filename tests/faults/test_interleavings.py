"""The laws under every order in which the statements of two or three actors can reach PostgreSQL.

Between any two statements of one, any of another; with ``kills`` an actor dies before each of its statements in turn.
How many states there are is stated: far fewer would say that the scheduler no longer comes everywhere. The largest
explorations, minutes each, run with ``INTERLEAVINGS=all`` in the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.contrib.auth import get_user_model
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine, maintenance
from django_idempotency.conf import resolve
from django_idempotency.engine import CRASHED
from django_idempotency.heartbeat import Heartbeat, Lease
from django_idempotency.maintenance import Cleaned, Reaped
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Claimed
from django_idempotency.policy import Policy
from django_idempotency.stores import database, postgresql
from testproject.models import LedgerEntry
from tests.callers import BODY, PAYER, SCOPE, door, operation
from tests.faults.schedule import Actor, Explorer, Found, Violation, pause, place, token

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]

ALL = os.environ.get("INTERLEAVINGS") == "all"
LEASE = 2 * 3600  # no schedule takes as long: time passes where it is told to
MODES = {
    "atomic": {"mode": "atomic", "lease": LEASE, "grace": 0},
    "lease": {"mode": "lease", "lease": LEASE},
    "hold": {"mode": "lease", "lease": LEASE, "on_crash": "hold"},
}
OTHER_BODY = b'{"amount": 6}'
EARLIER = "earlier"
MAINTENANCE = ("reaper", "cleanup")

LEDGER, RECORDS = LedgerEntry._meta.db_table, IdempotencyRecord._meta.db_table
LOOK = f"""
SELECT array(SELECT reference FROM {LEDGER} ORDER BY 1), record.* FROM (VALUES (1)) AS one LEFT JOIN (
    SELECT status, held, convert_from(response_body, 'UTF8'), status IN ('completed', 'failed') AND expires_at < now(),
        token, attempts, reason, response_status, fingerprint, locked_at > now() - interval '1 hour',
        locked_until > now(), purge_at > now(), ctid::text
    FROM {RECORDS}
) AS record ON true
"""
CLEAR = f"DELETE FROM {LEDGER}; DELETE FROM {RECORDS}"
HOURS_PASS = f"""
UPDATE {RECORDS} SET locked_at = locked_at - interval '3 hours', locked_until = locked_until - interval '3 hours'
"""
DAYS_PASS = f"UPDATE {RECORDS} SET expires_at = now() - interval '1 hour', purge_at = now() - interval '1 hour'"


class Row(NamedTuple):
    """The record as ``LOOK`` sees it; all ``None`` where there is none."""

    status: str | None
    held: bool | None
    body: str | None
    expired: bool | None
    token: Any
    attempts: int | None
    reason: str | None
    response_status: int | None
    fingerprint: Any
    new: bool | None
    leased: bool | None
    kept: bool | None
    place: int | None


def execute(sql: str) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)


def hours_pass() -> None:
    """The lease of whoever is running runs out, and so does the grace."""
    execute(HOURS_PASS)


def retention_ends() -> None:
    """What has been done with the key is forgotten, and its effects are not counted among those of its next life."""
    execute(f"DELETE FROM {LEDGER}; {DAYS_PASS}")


def told(result: Any) -> tuple[Any, str]:
    """What a caller got: the status and, of a success, the body."""
    if isinstance(result, BaseException):
        return type(result).__name__, ""
    return result.status_code, result.content.decode() if result.status_code == 201 else ""


def _stumbled(result: Any) -> bool:
    """Whether maintenance came upon a row that it can't write."""
    return isinstance(result, Exception) or bool(getattr(result, "bad", None))


def _rows(result: Any) -> int:
    """How many rows maintenance says that it wrote."""
    match result:
        case Reaped(failed=failed, held=held):
            return failed + held
        case Cleaned(rows=rows):
            return rows
    return 0


class World:
    """One key and one ledger, and the actors that have to do with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str = "atomic", **policy: Any) -> None:
        self.policy = MODES[mode] | policy
        self.resolved = resolve(Policy(scope=SCOPE, **self.policy))
        self.mode = mode
        self.user_id = get_user_model().objects.create_user(PAYER).pk
        self.heart = Heartbeat()
        monkeypatch.setattr(self.heart, "_wake", lambda seconds: None)  # no thread: it beats when an actor has it beat
        monkeypatch.setattr(engine, "heartbeat", self.heart)
        monkeypatch.setattr(engine, "uuid4", token)
        monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))

    def caller(self, outcome: int | Exception = 201, body: bytes = BODY, alone: str = "last") -> Callable[[], Any]:
        """A caller; its view pays, and then answers with the name of this run or raises ``outcome``.

        ``alone``: what it is called where it is no actor.
        """

        def view(request: Any) -> HttpResponse:
            name = getattr(Actor.here, "actor", SimpleNamespace(name=alone)).name
            run = f"{name}{request.idempotency.attempt}"
            self.ran.add(name)
            LedgerEntry.objects.create(kind="order", user_id=self.user_id, amount=5, currency="EUR", reference=run)
            if isinstance(outcome, Exception):
                raise outcome
            return HttpResponse(run, status=outcome)

        return lambda: door(view, **self.policy)(body=body)

    def beat(self) -> None:
        """A beat. What is kept when it begins is all that it renews."""
        actor = Actor.here.actor
        actor.gate("begin")
        self.beating = list(self.heart._leases)
        actor.learn(self.beating)
        self.heart.beat()

    def dead_holder(self) -> Claimed:
        """Somebody claimed, and was gone before it had the row lock."""
        claimed = engine.claim(operation(), self.resolved)
        assert isinstance(claimed, Claimed)
        hours_pass()
        return claimed

    def stopped_holder(self) -> None:
        """Somebody claimed, and stood still until the lease had run out; the heart goes on first."""
        claimed = self.dead_holder()
        self.heart._leases[claimed.token] = Lease(claimed, self.resolved)

    def earlier_life(self) -> None:
        """The key was used before; its retention has not ended."""
        self.caller(alone=EARLIER)()

    # --- What the explorer asks for ---

    def explore(self, works: dict[str, Any], *, given: Callable[[], Any] = lambda: None, **options: Any) -> Found:
        def prepare() -> None:
            self.heart._reset()
            self.beating: list[Any] = []
            self.ran, self.maintained = set[str](), 0
            execute(CLEAR)
            given()

        hooks = {
            "prepare": prepare,
            "look": self.look,
            "watch": self.watch,
            "finish": self.finish,
            "when_idle": hours_pass,
        }
        found = Explorer(works, **{**hooks, **options}).explore()
        print(f"{', '.join(works)}: {found}")  # pytest -rP shows it
        waited = [name for name in found.waited if name.startswith(MAINTENANCE)]
        assert not waited, "L11: maintenance waited for somebody alive"
        return found

    def look(self) -> Any:
        """The rows as they stand committed. Holds after every single statement."""
        with connections["default"].cursor() as cursor:
            cursor.execute(LOOK)
            effects, *columns = cursor.fetchone()
        row = Row(*columns[:-1], place(columns[-1]))
        if row.expired:
            assert not effects
            return (), row
        completed = row.status == "completed"
        if self.mode == "atomic":
            assert len(effects) <= 1, f"L1: {effects}"
            assert effects == ([row.body] if completed else []), f"L3, L4: {effects}, but {row}"
        if self.mode == "hold":
            assert len(effects) <= 1, f"L1: {effects}"
        if completed:
            assert row.body in effects, f"L3: {row.body} is stored, but the effects are {effects}"
        return tuple(effects), row

    def watch(self, mover: str, before: tuple[Any, Row], after: tuple[Any, Row]) -> None:
        """Every step, by whom it was."""
        (_effects, was), (_effects, now) = before, after
        deleted = was.status is not None and now.status is None
        reaped = was.token is not None and now.reason == CRASHED
        taken = was.token is not None and now.token not in (was.token, None)
        self.maintained += mover.startswith(MAINTENANCE) and (deleted or reaped)
        if self.mode != "atomic":
            assert not (was.leased and (taken or reaped)), f"L6: {mover} took a lease that had not run out"
        if mover == "beat" and was != now:
            assert was.token in self.beating, f"L5: a lease was renewed by another than its holder: {was}, {now}"

    runs_again = False  # the effects are outside the record's transaction, and something happens to their run

    may_answer = frozenset({201, 409, "Killed"})

    def finish(self, results: dict[str, Any]) -> Any:
        """Everybody has an answer or is dead. Once the leases of the dead have run out, there is a last retry."""
        stumbled = [name for name, result in results.items() if name.islower() and _stumbled(result)]
        assert not stumbled, f"L11: {results}"
        told_of = sum(_rows(result) for result in results.values())
        assert told_of == self.maintained, f"L11: maintenance told of {told_of} rows, and wrote {self.maintained}"
        answers = {name: told(result) for name, result in results.items() if name.isupper()}
        hours_pass()
        last = told(self.caller()())
        effects, row = self.look()
        assert {status for status, _body in [*answers.values(), last]} <= self.may_answer, answers
        successes = {body for status, body in [*answers.values(), last] if status == 201} - {f"{EARLIER}1"}
        assert len(successes) <= 1, f"L2: {answers}, and then {last}"
        assert successes <= {*effects}, f"L3: {answers}, and then {last}, but {effects}"
        if self.mode == "atomic":
            lost = [name for name in self.ran & answers.keys() if answers[name][0] == 409]
            assert not lost, f"L6: {lost} ran, and lived, and lost"
        if not (self.mode == "hold" and row.held):
            assert (row.status, row.body, last[0]) == ("completed", last[1], 201), f"no end: {row}, {last}"
            assert self.runs_again or list(effects) == [last[1]], f"L1: {effects}"
        return tuple(sorted(answers.items())), last


@pytest.fixture
def world(monkeypatch):
    return lambda *args, **policy: World(monkeypatch, *args, **policy)


in_all_modes = pytest.mark.parametrize("mode", MODES)
LARGEST = [True] if ALL else []
REAPERS = [dict.fromkeys(names, maintenance.reap) for names in ((), ("reaper",), ("reaper", "reaper2"))]


# --- Callers alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "states"), [("atomic", 85), ("lease", 11), ("hold", 11)])
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
def test_two_callers(world, mode, states, lock):
    w = world(mode, lock=lock)
    assert w.explore({"A": w.caller(), "B": w.caller()}).states >= states


@pytest.mark.parametrize(("mode", "schedules"), [("lease", 6), *(("atomic", 130) for _ in LARGEST)])
def test_a_schedule_that_is_cut_short_would_have_come_to_nothing_new(world, mode, schedules):
    w = world(mode)
    works = {"A": w.caller(), "B": w.caller()}
    uncut = w.explore(works, prune=False)
    assert (uncut.cut, uncut.schedules >= schedules) == (0, True)
    assert w.explore(works).outcomes == uncut.outcomes


@pytest.mark.parametrize(("mode", "states"), [("lease", 38), ("hold", 38), *(("atomic", 3000) for _ in LARGEST)])
def test_three_callers(world, mode, states):
    w = world(mode)
    assert w.explore({name: w.caller() for name in "ABC"}).states >= states


@pytest.mark.parametrize("kills", [1, *(2 for _ in LARGEST)])
@pytest.mark.parametrize(
    ("mode", "in_flight", "states"),
    [
        ("atomic", "reject", 230),
        ("lease", "reject", 20),
        ("lease", "wait", 75),
        ("hold", "wait", 65),
        *(("atomic", "wait", 370) for _ in LARGEST),
    ],
)
def test_two_callers_that_die(world, mode, in_flight, states, kills):
    w = world(mode, in_flight=in_flight, wait=1000)
    w.runs_again = mode == "lease"
    found = w.explore({"A": w.caller(), "B": w.caller()}, kills=kills)
    assert found.states >= states
    assert found.kills >= 16


def test_for_the_grace_nobody_alive_is_overtaken(world):
    w = world(grace=3600)
    found = w.explore({"A": w.caller(), "B": w.caller()}, kills=1)
    lost = [told for told, last in found.outcomes if last[1][-1] != "1" and "Killed" not in str(told)]
    assert not lost
    assert found.states >= 250


@pytest.mark.parametrize("outcome", [404, 500, ValueError()], ids=str)
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_caller_whose_view_fails_or_refuses(world, mode, outcome):
    w = world(mode)
    w.runs_again = mode == "lease"
    w.may_answer = w.may_answer | {404, 500, "ValueError"}
    assert w.explore({"A": w.caller(outcome), "B": w.caller()}).states >= 13


@in_all_modes
def test_two_callers_with_different_requests(world, mode):
    w = world(mode)

    def finish(results):
        answers = sorted(told(result) for result in results.values())
        _effects, row = w.look()
        assert [status for status, _body in answers] in ([201, 422], [409, 422])
        return tuple(answers), row.status

    found = w.explore({"A": w.caller(), "B": w.caller(body=OTHER_BODY)}, finish=finish)
    assert {status for _answers, status in found.outcomes} == {"completed"}


# --- Time, the heartbeat and maintenance -----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "states"), [("lease", 75), ("hold", 60), *(("atomic", 460) for _ in LARGEST)])
def test_callers_whose_leases_run_out(world, mode, states):
    w = world(mode)
    w.runs_again = mode == "lease"
    assert w.explore({"A": w.caller(), "B": w.caller(), "time": hours_pass}).states >= states


@pytest.mark.parametrize("callers", ["A", *("AB" for _ in LARGEST)])
def test_the_heartbeat_beside_holders_and_zombies(world, callers):
    w = world("lease")
    w.runs_again = True
    works = {name: w.caller() for name in callers}
    assert w.explore({**works, "time": hours_pass, "beat": w.beat}).states >= 52


@pytest.mark.parametrize(
    ("mode", "callers", "reapers"),
    [("atomic", "A", 2), *((mode, *who) for mode in MODES for who in (("A", 2), ("AB", 1)) for _ in LARGEST)],
)
def test_reapers_beside_live_and_dead_holders(world, mode, callers, reapers):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = {name: w.caller() for name in callers}
    assert w.explore({**works, "time": hours_pass, **REAPERS[reapers]}).states >= 145


@pytest.mark.parametrize(
    ("mode", "others", "reapers"),
    [
        *((mode, "B", 0) for mode in MODES),
        ("lease", "", 2),
        *((mode, *who) for mode in MODES for who in (("", 2), ("B", 1)) for _ in LARGEST),
    ],
)
def test_a_dead_holder_is_found_by_a_caller_and(world, mode, others, reapers):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = {name: w.caller() for name in ("A", *others)}
    assert w.explore({**works, **REAPERS[reapers]}, given=w.dead_holder).states >= 25


@pytest.mark.parametrize(
    ("mode", "others", "states"),
    [
        ("hold", {}, 100),
        *(("lease", {}, 230) for _ in LARGEST),
        *((mode, {"time": hours_pass}, 490) for mode in ("lease", "hold") for _ in LARGEST),
    ],
)
def test_a_lease_that_ran_out_is_renewed_or_reaped_or_taken_over(world, mode, others, states):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = {"A": w.caller(), "beat": w.beat, "reaper": maintenance.reap, **others}
    assert w.explore(works, given=w.stopped_holder).states >= states


@pytest.mark.parametrize(
    ("mode", "callers", "others", "states"),
    [
        ("atomic", "AB", {}, 200),
        ("atomic", "A", {"cleanup": maintenance.cleanup}, 75),
        ("hold", "A", {"cleanup": maintenance.cleanup}, 60),
        ("lease", "A", {"cleanup": maintenance.cleanup}, 60),
        *((mode, "AB", {"cleanup": maintenance.cleanup}, 630) for mode in MODES for _ in LARGEST),
    ],
)
def test_the_retention_ends_beside(world, mode, callers, others, states):
    w = world(mode)
    works = {name: w.caller() for name in callers}
    assert w.explore({**works, **others, "expiry": retention_ends}, given=w.earlier_life).states >= states


# --- A schedule that goes another way when it is played again ---------------------------------------------------------


def explored(shorter, judge=lambda play: None):
    """Two actors with two statements each; in the plays whose numbers are given, one of them has none."""
    plays = count(1)
    current = [0]

    def prepare():
        current[0] = next(plays)

    def two():
        execute("SELECT 1")
        execute("SELECT 2")

    def two_or_none():
        if current[0] not in shorter:
            two()

    def finish(answers):
        judge(current[0])
        return len(answers)

    works = {"A": two, "B": two_or_none}
    return Explorer(works, prepare=prepare, look=lambda: None, finish=finish, prune=False).explore()


def test_a_schedule_that_diverged_is_played_again():
    usual, disturbed = explored(()), explored(range(2, 200, 2))
    assert (usual.diverged, usual.missed, usual.schedules) == (0, 0, 6)
    assert (disturbed.diverged > 0, disturbed.missed) == (True, 0)


def test_a_schedule_that_always_diverges_is_counted():
    found = explored(range(3, 1000))
    assert found.missed
    assert f"{found.missed} missed" in str(found)


def test_a_law_that_is_broken_in_a_schedule_that_diverged_is_broken():
    def judge(play):
        assert play != 2, "L1"

    with pytest.raises(Violation, match="L1"):
        explored({2}, judge)


# --- Each guard, taken out, is missed --------------------------------------------------------------------------------


def without(monkeypatch, name, part, instead=""):
    """The statement ``name`` less a part of it."""
    statement = getattr(postgresql, name)
    assert part in statement
    monkeypatch.setattr(postgresql, name, statement.replace(part, instead))


UNFENCED = ("AND token = %s", "AND %s::uuid IS NOT NULL")


def test_without_the_fence_a_zombie_completes_anothers_claim(world, monkeypatch):
    w = world("lease")
    w.runs_again = True
    without(monkeypatch, "COMPLETE", *UNFENCED)
    with pytest.raises(Violation, match="L2"):
        w.explore({"A": w.caller(), "B": w.caller(), "time": hours_pass})


def test_without_the_fence_an_atomic_holder_that_was_overtaken_runs(world, monkeypatch):
    w = world()
    without(monkeypatch, "LOCK", *UNFENCED)
    without(monkeypatch, "COMPLETE", *UNFENCED)
    with pytest.raises(Violation, match="L1"):
        w.explore({"A": w.caller(), "B": w.caller()})


def test_without_its_row_lock_a_live_holder_is_overtaken(world, monkeypatch):
    w = world()
    without(monkeypatch, "LOCK", "FOR NO KEY UPDATE")
    with pytest.raises(Violation, match="L6"):
        w.explore({"A": w.caller(), "B": w.caller()})


@in_all_modes
def test_without_a_lock_two_take_what_one_may(world, monkeypatch, mode):
    w = world(mode)
    monkeypatch.setattr(database, "_for_update", lambda rows, policy, **how: rows)
    with pytest.raises(Violation, match=r"L[123]"):
        w.explore({"A": w.caller(), "B": w.caller(), "expiry": retention_ends}, given=w.earlier_life)


def test_without_a_lock_the_reaper_waits_for_a_live_holder(world, monkeypatch):
    w = world()
    monkeypatch.setattr(maintenance, "locked", lambda rows: rows)
    with pytest.raises(AssertionError, match=r"L11|L3"):  # or takes from it what it has answered meanwhile
        w.explore({"A": w.caller(), "time": hours_pass, "reaper": maintenance.reap})


def test_without_a_lock_two_reapers_reap_the_same(world, monkeypatch):
    w = world()
    monkeypatch.setattr(maintenance, "locked", lambda rows: rows)
    with pytest.raises(Violation, match="L11: maintenance told of 2 rows, and wrote 1"):
        w.explore({"reaper": maintenance.reap, "reaper2": maintenance.reap}, given=w.dead_holder)


def test_without_a_lock_the_reaper_takes_a_lease_that_is_renewed(world, monkeypatch):
    w = world("lease")
    monkeypatch.setattr(maintenance, "locked", lambda rows: rows)
    with pytest.raises(Violation, match="L6: reaper took"):
        w.explore({"beat": w.beat, "reaper": maintenance.reap}, given=w.stopped_holder)


def test_without_a_second_look_a_lease_that_is_renewed_is_taken_over(world, monkeypatch):
    def take_over(claimant):
        with claimant.store.contend(claimant.operation.id, claimant.policy) as record:
            return claimant.store.take(record, claimant.operation, claimant.token, claimant.policy)

    w = world("lease")
    monkeypatch.setattr(engine._Claimant, "_change_hands", take_over)
    with pytest.raises(Violation, match="L6: A took"):
        w.explore({"A": w.caller(), "beat": w.beat}, given=w.stopped_holder)


def test_without_the_fence_a_zombie_renews_anothers_lease(world, monkeypatch):
    def renew(store, claims, policy):
        ids = [claim.id for claim in claims]
        IdempotencyRecord.objects.filter(pk__in=ids).update(locked_until=database.ahead(policy.lease))

    w = world("lease")
    w.runs_again = True
    monkeypatch.setattr(database.DatabaseStore, "renew", renew)
    with pytest.raises(Violation, match="L5"):
        w.explore({"A": w.caller(), "beat": w.beat, "time": hours_pass}, given=w.stopped_holder)


@in_all_modes
def test_without_the_end_of_the_retention_the_cleanup_lets_a_duplicate_through(world, monkeypatch, mode):
    w = world(mode)
    monkeypatch.setattr(maintenance, "purgeable", lambda using: IdempotencyRecord.objects.filter(token=None))
    works = {"A": w.caller(), "cleanup": maintenance.cleanup, "expiry": retention_ends}
    with pytest.raises(Violation, match=r"L[123]"):
        w.explore(works, given=w.earlier_life)


def test_without_a_lock_cleaning_up_waits_for_a_live_holder(world, monkeypatch):
    w = world()
    monkeypatch.setattr(maintenance, "locked", lambda rows: rows)
    with pytest.raises(AssertionError, match="L11: maintenance waited"):
        w.explore({"A": w.caller(), "cleanup": maintenance.cleanup, "expiry": retention_ends}, given=w.earlier_life)


def test_without_the_grace_a_live_claim_is_overtaken_before_its_row_lock(world):
    w = world(grace=0)
    found = w.explore({"A": w.caller(), "B": w.caller()})
    assert any(last[1] in ("A2", "B2") for _told, last in found.outcomes)
