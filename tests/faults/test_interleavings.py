"""The laws under every order in which the statements of two or three actors can reach PostgreSQL.

Between any two statements of one, any of another; with ``kills`` an actor dies before each of its statements in turn.
The numbers of schedules are stated: one that is far off says that the scheduler no longer sees what it did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine, maintenance
from django_idempotency.heartbeat import Heartbeat
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import database, postgresql
from testproject.models import LedgerEntry
from tests.callers import BODY, PAYER, door
from tests.faults.schedule import Actor, Explorer, Found, Killed, Violation, pause, token

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]

ALL = os.environ.get("INTERLEAVINGS") == "all"
LEASE = 2 * 3600  # no schedule takes as long: time passes where it is told to
MODES = {
    "atomic": {"mode": "atomic", "lease": LEASE, "grace": 0},
    "lease": {"mode": "lease", "lease": LEASE},
    "hold": {"mode": "lease", "lease": LEASE, "on_crash": "hold"},
}
OTHER_BODY = b'{"amount": 6}'

LEDGER, RECORDS = LedgerEntry._meta.db_table, IdempotencyRecord._meta.db_table
LOOK = f"""
SELECT array(SELECT reference FROM {LEDGER} ORDER BY 1), record.* FROM (VALUES (1)) AS one LEFT JOIN (
    SELECT status, held, convert_from(response_body, 'UTF8'), token, attempts, reason, response_status, fingerprint,
        locked_at > now() - interval '1 hour', locked_until > now(), expires_at > now(), purge_at > now()
    FROM {RECORDS}
) AS record ON true
"""
CLEAR = f"DELETE FROM {LEDGER}; DELETE FROM {RECORDS}"
HOURS_PASS = f"""
UPDATE {RECORDS} SET locked_at = locked_at - interval '3 hours', locked_until = locked_until - interval '3 hours'
"""
DAYS_PASS = f"UPDATE {RECORDS} SET expires_at = now() - interval '1 hour', purge_at = now() - interval '1 hour'"


def execute(sql: str) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)


def hours_pass() -> None:
    """The lease of whoever is running runs out, and so does the grace."""
    execute(HOURS_PASS)


def told(result: Any) -> tuple[Any, str]:
    """What a caller got: the status and, of a success, the body."""
    if isinstance(result, BaseException):
        return type(result).__name__, ""
    return result.status_code, result.content.decode() if result.status_code == 201 else ""


class World:
    """One key and one ledger, and the actors that have to do with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str = "atomic", **policy: Any) -> None:
        self.policy = MODES[mode] | policy
        self.mode = mode
        self.user_id = get_user_model().objects.create_user(PAYER).pk
        self.heart = Heartbeat()
        monkeypatch.setattr(self.heart, "_wake", lambda: None)  # no thread: it beats when an actor has it beat
        monkeypatch.setattr(engine, "heartbeat", self.heart)
        monkeypatch.setattr(engine, "uuid4", token)
        monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))

    def caller(self, outcome: int | Exception = 201, body: bytes = BODY) -> Callable[[], Any]:
        """A caller; its view pays, and then answers with the name of this run or raises ``outcome``."""

        def view(request: Any) -> HttpResponse:
            name = getattr(Actor.here, "actor", SimpleNamespace(name="last")).name
            run = f"{name}{request.idempotency.attempt}"
            self.ran.add(name)
            LedgerEntry.objects.create(kind="order", user_id=self.user_id, amount=5, currency="EUR", reference=run)
            if isinstance(outcome, Exception):
                raise outcome
            return HttpResponse(run, status=outcome)

        return lambda: door(view, **self.policy)(body=body)

    def dead_holder(self) -> None:
        """Claimed, and gone before its row lock."""
        engine.claim(self.operation(), self.resolved())
        execute(HOURS_PASS)

    def beat(self) -> None:
        self.heart.beat()

    # --- What the explorer asks for ---

    def explore(self, works: dict[str, Any], *, given: Callable[[], Any] = lambda: None, **options: Any) -> Found:
        def prepare() -> None:
            self.heart._reset()
            self.ran = set[str]()
            execute(CLEAR)
            given()

        hooks = {"prepare": prepare, "look": self.look, "finish": self.finish, "when_idle": hours_pass}
        found = Explorer(works, **{**hooks, **options}).explore()
        print(found)
        return found

    def look(self) -> Any:
        """The rows as they stand committed. Holds after every single statement."""
        with connections["default"].cursor() as cursor:
            cursor.execute(LOOK)
            effects, *record = cursor.fetchone()
        status, _held, body, *_rest = record
        if self.mode == "atomic":
            assert len(effects) <= 1, f"L1: {effects}"
            assert effects == ([body] if status == "completed" else []), f"L3, L4: {effects}, but {record}"
        if self.mode == "hold":
            assert len(effects) <= 1, f"L1: {effects}"
        if status == "completed":
            assert body in effects, f"L3: {body} is stored, but the effects are {effects}"
        return tuple(effects), tuple(record)

    runs_again = False  # the effects are outside the record's transaction, and something happens to their run

    def finish(self, results: dict[str, Any]) -> Any:
        """Everybody has an answer or is dead. Once the leases of the dead have run out, there is a last retry."""
        answers = {name: told(result) for name, result in results.items() if name.isupper()}
        hours_pass()
        last = told(self.caller()())
        (effects, (status, held, body, *_rest)) = self.look()
        assert {status for status, _body in [*answers.values(), last]} <= {201, 409, "Killed", *self.expected}, answers
        successes = {body for status, body in [*answers.values(), last] if status == 201}
        assert len(successes) <= 1, f"L2: {answers}, and then {last}"
        assert successes <= {*effects}, f"L3: {answers}, and then {last}, but {effects}"
        if self.mode == "atomic":
            lost = [name for name in self.ran - {"last"} if answers[name][0] == 409]
            assert not lost, f"L6: {lost} ran, and lived, and lost"
        if not (self.mode == "hold" and held):
            assert (status, body, last[0]) == ("completed", last[1], 201), f"no end: {status}, {last}"
            assert self.runs_again or list(effects) == [last[1]], f"L1: {effects}"
        return tuple(sorted(answers.items())), last

    expected: frozenset[Any] = frozenset()


@pytest.fixture
def world(monkeypatch):
    return lambda *args, **policy: World(monkeypatch, *args, **policy)


@pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
@pytest.mark.parametrize("mode", MODES)
def test_two(world, mode, lock):
    w = world(mode, lock=lock)
    w.explore({"A": w.caller(), "B": w.caller()})


@pytest.mark.parametrize("mode", MODES)
def test_two_kill(world, mode):
    w = world(mode)
    w.runs_again = mode == "lease"
    w.explore({"A": w.caller(), "B": w.caller()}, kills=1)


@pytest.mark.parametrize("mode", MODES)
def test_three(world, mode):
    w = world(mode)
    w.explore({"A": w.caller(), "B": w.caller(), "C": w.caller()})


@pytest.mark.parametrize("mode", MODES)
def test_time(world, mode):
    w = world(mode)
    w.runs_again = mode == "lease"
    w.explore({"A": w.caller(), "B": w.caller(), "time": hours_pass})


@pytest.mark.parametrize("mode", MODES)
def test_reap(world, mode):
    w = world(mode)
    w.runs_again = mode == "lease"
    w.explore({"A": w.caller(), "B": w.caller(), "time": hours_pass, "reaper": maintenance.reap})


@pytest.mark.parametrize("mode", MODES)
def test_wait(world, mode):
    w = world(mode, in_flight="wait", wait=1000)
    w.explore({"A": w.caller(), "B": w.caller()})


@pytest.mark.parametrize("mode", MODES)
def test_wait_kill(world, mode):
    w = world(mode, in_flight="wait", wait=1000)
    w.runs_again = mode == "lease"
    w.explore({"A": w.caller(), "B": w.caller()}, kills=1)


def test_grace(world):
    w = world(grace=3600)
    w.explore({"A": w.caller(), "B": w.caller()}, kills=1)
