"""One key and the actors that want it, for every order of their statements."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.contrib.auth import get_user_model
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine.background import Worker
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.leases import BEATS_PER_LEASE, keeper_of
from django_idempotency.maintenance import reaper
from django_idempotency.maintenance.sweep import Swept
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.outcomes import Claimed
from django_idempotency.values.policy import Atomic, Lease, Policy
from testproject.models import LedgerEntry
from tests.faults.schedule import Actor, Explorer, Found, pause, place, token
from tests.support.callers import BODY, PAYER, SCOPE, entry_point, operation, stop
from tests.support.sql import run_sql, value_of
from tests.support.waiting import eventually

LEASE = 2 * 3600  # longer than any schedule takes: time passes only when it is told to
MODES = {
    "atomic": {"mode": Atomic(takeover_grace=0)},
    "lease": {"mode": Lease(seconds=LEASE)},
    "hold": {"mode": Lease(seconds=LEASE, on_crash="hold")},
}


EARLIER = "earlier"
MAINTENANCE = ("reaper", "cleanup")

LEDGER, RECORDS = LedgerEntry._meta.db_table, IdempotencyRecord._meta.db_table
LOOK = f"""
SELECT array(SELECT reference FROM {LEDGER} ORDER BY 1), record.* FROM (VALUES (1))
    AS one LEFT JOIN (
    SELECT
        status, on_hold, convert_from(response_body, 'UTF8'), status IN ('completed',
            'failed') AND expires_at < now(),
        token, attempts, reason, response_status, fingerprint, locked_at > now() -
            interval '1 hour',
        locked_until > now(), purge_at > now(), ctid::text
    FROM {RECORDS}
) AS record ON true
"""
CLEAR = f"DELETE FROM {LEDGER}; DELETE FROM {RECORDS}"
ADVISORY_LOCKS = """
SELECT count(*) FROM pg_locks JOIN pg_database AS here ON here.oid = database
    AND datname = current_database()
WHERE locktype = 'advisory'
"""
HOURS_PASS = f"""
UPDATE {RECORDS} SET locked_at = locked_at - interval '3 hours',
    locked_until = locked_at - interval '3 hours'
"""
DAYS_PASS = (
    f"UPDATE {RECORDS} SET expires_at = now() - interval '1 hour', purge_at = now() -"
    " interval '1 hour'"
)


class Row(NamedTuple):
    """The record as ``LOOK`` sees it; all ``None`` if there is none."""

    status: str | None
    on_hold: bool | None
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


def hours_pass() -> None:
    """The lease of whoever is running runs out, and is watched for a heartbeat's time;
    and so does the grace.
    """
    run_sql(HOURS_PASS)


def retention_ends() -> None:
    """What has been done with the key is forgotten, and its effects are not counted
    among those of its next life.
    """
    run_sql(f"DELETE FROM {LEDGER}; {DAYS_PASS}")


def no_locks_are_left() -> None:
    """Wait for the server to find out who is dead: what they had locked as claims is
    locked until then.
    """
    eventually(lambda: not value_of(ADVISORY_LOCKS))


def told(result: Any) -> tuple[Any, str]:
    """What a caller got: the status and, of a success, the body."""
    if isinstance(result, BaseException):
        return type(result).__name__, ""
    return (
        result.status_code,
        result.content.decode() if result.status_code == 201 else "",
    )


def _stumbled(result: Any) -> bool:
    """Whether maintenance came upon a row that it can't write."""
    return isinstance(result, Exception) or bool(getattr(result, "bad", None))


def _rows(result: Any) -> int:
    """How many rows maintenance says that it wrote."""
    return result.rows if isinstance(result, Swept) else 0


def changed(policy: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``policy`` with ``changes``, some of which are options of its mode."""
    of_mode = {
        name: value
        for name, value in changes.items()
        if name in ("claim", "takeover_grace")
    }
    others = {name: value for name, value in changes.items() if name not in of_mode}
    return policy | {"mode": replace(policy["mode"], **of_mode)} | others


class World:
    """One key, one ledger, and the actors that use them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mode: str = "atomic", **policy: Any
    ) -> None:
        self.policy = changed(MODES[mode], policy)
        self.resolved = resolve(Policy(scope=SCOPE, **self.policy))
        self.mode = mode
        # actors whose runs are released: what they wrote stays, as without a key
        self.refused: tuple[str, ...] = ()
        self.user_id = get_user_model().objects.create_user(PAYER).pk
        self.store = store_for(self.resolved)
        self.keeper = keeper_of(self.store)
        # no thread: it renews when an actor makes it renew
        monkeypatch.setattr(Worker, "wake", lambda worker: None)
        # the actor's
        monkeypatch.setattr(
            DatabaseStore, "own_connection", lambda store, **limits: nullcontext()
        )
        for module in (engine.waiting, engine.atomic_runs):
            monkeypatch.setattr(
                module, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic)
            )
        monkeypatch.setattr(engine.claims, "uuid4", token)
        # The reaper tells the database how long it has watched. That time differs from
        # run to run, so the state would never come again.
        monkeypatch.setattr(reaper, "LONGEST_WATCH", 0.0)
        monkeypatch.setattr(reaper, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def caller(
        self,
        outcome: int | Exception = 201,
        body: bytes = BODY,
        alone: str = "last",
        **policy: Any,
    ) -> Callable[[], Any]:
        """A caller; its view pays, and then answers with the name of this run or raises
        ``outcome``.

        ``alone``: what it is called where it is no actor. ``policy``: what differs for
        it.
        """

        def view(request: Any) -> HttpResponse:
            name = getattr(Actor.here, "actor", SimpleNamespace(name=alone)).name
            run = f"{name}{request.idempotency.attempt}"
            self.ran.add(name)
            LedgerEntry.objects.create(
                kind="order",
                user_id=self.user_id,
                amount=5,
                currency="EUR",
                reference=run,
            )
            if isinstance(outcome, Exception):
                raise outcome
            return HttpResponse(run, status=outcome)

        return lambda: entry_point(view, **changed(self.policy, policy))(body=body)

    def beat(self) -> None:
        """A beat. What is kept when it begins is all that it renews."""
        actor = Actor.here.actor
        actor.gate("begin")
        self.beating = list(self.keeper._leases)
        actor.learn(self.beating)
        if self.beating:
            self.keeper._renew(
                [*self.keeper._leases.values()], LEASE / BEATS_PER_LEASE / 2
            )

    def dead_holder(self) -> Claimed:
        """Somebody claimed, and was gone before it had the row lock."""
        claimed = engine.claim(operation(), self.resolved)
        assert isinstance(claimed, Claimed)
        hours_pass()
        return claimed

    def stopped_holder(self) -> None:
        """Somebody claimed, and stood still until the lease had run out; the heart goes
        on first.
        """
        claimed = self.dead_holder()
        self.keeper.add(claimed, self.store)

    def earlier_life(self) -> None:
        """The key was used before; its retention has not ended."""
        self.caller(alone=EARLIER)()

    # --- What the explorer asks for ---

    def explore(
        self,
        works: dict[str, Any],
        *,
        given: Callable[[], Any] = lambda: None,
        **options: Any,
    ) -> Found:
        def prepare() -> None:
            # it may be on its way to sleep with a lock that is about to be replaced
            stop(self.keeper)
            self.keeper.reset()
            no_locks_are_left()
            self.beating: list[Any] = []
            self.ran, self.maintained = set[str](), 0
            run_sql(CLEAR)
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
        effects = [effect for effect in effects if not effect.startswith(self.refused)]
        if row.expired:
            assert not effects
            return (), row
        completed = row.status == "completed"
        if self.mode == "atomic":
            assert len(effects) <= 1, f"L1: {effects}"
            assert effects == ([row.body] if completed else []), (
                f"L3, L4: {effects}, but {row}"
            )
        if self.mode == "hold":
            assert len(effects) <= 1, f"L1: {effects}"
        if completed:
            assert row.body in effects, (
                f"L3: {row.body} is stored, but the effects are {effects}"
            )
        return tuple(effects), row

    def watch(
        self, mover: str, before: tuple[Any, Row], after: tuple[Any, Row]
    ) -> None:
        """Every step, by whom it was."""
        (_effects, was), (_effects, now) = before, after
        deleted = was.status is not None and now.status is None
        reaped = was.token is not None and now.reason == LEASE_LAPSED
        taken = was.token is not None and now.token not in (was.token, None)
        self.maintained += mover.startswith(MAINTENANCE) and (deleted or reaped)
        if self.mode != "atomic":
            assert not (was.leased and (taken or reaped)), (
                f"L6: {mover} took a lease that had not run out"
            )
        if mover == "beat" and was != now:
            assert was.token in self.beating, (
                f"L5: a lease was renewed by another than its owner: {was}, {now}"
            )

    # true if the effects are outside the record's transaction, and something happens to
    # their run
    runs_again = False

    may_answer = frozenset({201, 409, "Killed"})

    def finish(self, results: dict[str, Any]) -> Any:
        """Everybody has an answer or is dead. Once the leases of the dead have run out,
        there is a last retry.
        """
        stumbled = [
            name
            for name, result in results.items()
            if name.islower() and _stumbled(result)
        ]
        assert not stumbled, f"L11: {results}"
        told_of = sum(_rows(result) for result in results.values())
        assert told_of == self.maintained, (
            f"L11: maintenance told of {told_of} rows, and wrote {self.maintained}"
        )
        answers = {
            name: told(result) for name, result in results.items() if name.isupper()
        }
        no_locks_are_left()
        hours_pass()
        last = told(self.caller()())
        effects, row = self.look()
        assert {
            status for status, _body in [*answers.values(), last]
        } <= self.may_answer, answers
        successes = {
            body for status, body in [*answers.values(), last] if status == 201
        } - {f"{EARLIER}1"}
        assert len(successes) <= 1, f"L2: {answers}, and then {last}"
        assert successes <= {*effects}, f"L3: {answers}, and then {last}, but {effects}"
        if self.mode == "atomic":
            lost = [
                name for name in self.ran & answers.keys() if answers[name][0] == 409
            ]
            assert not lost, f"L6: {lost} ran, and lived, and lost"
        if not (self.mode == "hold" and row.on_hold):
            assert (row.status, row.body, last[0]) == (
                "completed",
                last[1],
                201,
            ), f"no end: {row}, {last}"
            assert self.runs_again or list(effects) == [last[1]], f"L1: {effects}"
        return tuple(sorted(answers.items())), last


in_all_modes = pytest.mark.parametrize("mode", MODES)
