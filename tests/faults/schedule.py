"""Try every order in which a few actors' statements can reach PostgreSQL, one after the
other.

An actor is a thread with a connection of its own. It stops before each statement,
COMMIT and ROLLBACK, and before each pause. One actor at a time is let go. What it does
between two stops must not concern any other actor. An actor that waits for a row lock
is noticed (``pg_blocking_pids``), and can't be let go. ``Explorer`` goes through the
schedules depth first. Actors that have seen the same, before the same rows, continue in
the same way. So nothing new can come from a state that was reached before, and the
schedule is cut there. Two actors are given the same work by the same function: while
neither has begun, only one of them does.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
from django.db import connection as monitor
from django.db import connections

PATIENCE = 120  # seconds; far more than any statement here takes
LOOK_AFTER = 0.004  # a statement that takes longer may be waiting for a lock
# These differ each time that a schedule is played.
NAMES_OF_THE_SERVER = (b"pg_backend_pid", b"transaction")
TIMESTAMPTZ, TID = 1184, 27  # their types' numbers
# how a claim tells when its record was made
WRITTEN_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\+00")
HOUR = 3600
IDLE = "(time passes)"
TRIES = 5  # for a schedule that goes another way when it is played again

# who prepares a schedule and finishes it
OUTSIDE = SimpleNamespace(name="outside", tokens=0)

Work = Callable[[], Any]


class Killed(BaseException):
    """The actor's process is gone."""


class Stuck(AssertionError):
    """No actor can continue, and not all are done."""


class Violation(AssertionError):
    """A law is broken. The message says by which schedule."""


class Diverged(Exception):
    """A schedule went another way when it was played again: PostgreSQL let another
    waiting actor go first.
    """


class Actor:
    """A thread that is told what to do, and stops at every gate on the way."""

    here = threading.local()

    def __init__(self, name: str, moved: threading.Condition) -> None:
        self.name = name
        self.moved = moved
        self.work: Work | None = None
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()
        with moved:
            assert moved.wait_for(lambda: self.ready, PATIENCE)

    ready = False

    @property
    def pid(self) -> int:
        """Of the connection there is now, 0 for none: a claim replaces one that was
        left in a transaction.
        """
        try:
            return (
                self.connection.connection.info.backend_pid
                if self.connection.connection
                else 0
            )
        except psycopg.OperationalError:  # closed by its thread just now
            return 0

    def begin(self, work: Work) -> None:
        self.at: str | None = None  # the gate it stands at
        self.running, self.paused, self.asks_again, self.dying = (
            True,
            False,
            False,
            False,
        )
        self.fresh = True  # it has done nothing yet
        self.tokens = 0
        self.seen: Hashable = self.name  # all it has asked and been told
        self.result: Any = None
        self.work = work

    @property
    def done(self) -> bool:
        return self.work is None

    @contextmanager
    def _gates(self) -> Iterator[None]:
        connection = connections["default"]
        # For every connection that it opens, because one that a kill left in a
        # transaction is replaced.
        options = {
            **connection.settings_dict["OPTIONS"],
            "options": "-c synchronous_commit=off",
        }
        connection.settings_dict = {
            **connection.settings_dict,
            "CONN_MAX_AGE": None,
            "OPTIONS": options,
        }
        connection.ensure_connection()
        self.connection = connection
        for name in ("_commit", "_rollback"):
            setattr(
                connection,
                name,
                self._gated(name.strip("_").upper(), getattr(connection, name)),
            )
        try:
            with connection.execute_wrapper(self._execute):
                yield
        finally:
            connections.close_all()

    def _live(self) -> None:
        Actor.here.actor = self
        with self._gates(), self.moved:
            self.ready = True
            self.moved.notify_all()
            while self.moved.wait_for(lambda: self.work is not None):
                work = self.work
                if work is STOP:
                    return
                self.moved.release()
                try:
                    result = self._do(work)
                finally:
                    self.moved.acquire()
                self.result, self.work, self.running, self.at = (
                    result,
                    None,
                    False,
                    None,
                )
                self.moved.notify_all()

    def _do(self, work: Any) -> Any:
        try:
            return work()
        except (Killed, Exception) as error:
            return Killed() if self.dying else error
        finally:
            # After a kill, Django has done none of its own bookkeeping.
            self.connection.in_atomic_block, self.connection.needs_rollback = (
                False,
                False,
            )
            self.connection.savepoint_ids, self.connection.atomic_blocks = [], []
            (
                self.connection.run_on_commit,
                self.connection.run_commit_hooks_on_set_autocommit_on,
            ) = (
                [],
                False,
            )
            if not self.connection.get_autocommit():
                self.connection.connection.rollback()
                self.connection.set_autocommit(True)

    def gate(self, name: str, *, pause: bool = False) -> None:
        """Stop here until let go; the name tells this statement from others."""
        with self.moved:
            if not self.dying:
                self.at, self.paused, self.running = name, pause, False
                self.moved.notify_all()
                assert self.moved.wait_for(lambda: self.running, PATIENCE), (
                    f"{self.name} was left at {name}"
                )
            if self.dying:
                raise Killed
        self.learn(name)

    def ask_again(self) -> None:
        """Stop until something has changed. Between its rounds a claimant remembers
        nothing but its token.
        """
        self.asks_again, self.seen = True, (self.name, self.tokens, "asks again")
        self.gate("pause", pause=True)

    def learn(self, what: Hashable) -> None:
        self.seen = hashlib.blake2b(
            repr((self.seen, what)).encode(), digest_size=12
        ).hexdigest()

    def _execute(
        self, execute: Any, sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        self.gate(" ".join(sql.split())[:60])
        try:
            result = execute(sql, params, many, context)
        except Exception as error:
            self.learn(type(error).__name__)
            raise
        self.learn(_rows(context["cursor"].cursor))
        return result

    def _gated(self, name: str, do: Work) -> Work:
        def gated() -> Any:
            # Psycopg sends BEGIN with the first statement. If there was none, there is
            # nothing to stop before.
            if self.connection.connection.info.transaction_status:
                self.gate(name)
            return do()

        return gated


def STOP() -> None:
    """Work that ends a thread."""


def _tell(sql: str) -> None:
    with monitor.cursor() as cursor:
        cursor.execute(sql)


def _rows(cursor: Any) -> Hashable:
    """What a statement answered, as it would answer it each time that the schedule is
    played.

    Times are told by the hour, which is longer than a schedule takes; places and names
    of the server's are numbered.
    """
    result = cursor.pgresult
    columns = [
        (result.fname(column), result.ftype(column)) for column in range(result.nfields)
    ]
    return cursor.rowcount, tuple(
        tuple(
            _value(result.get_value(row, number), *column)
            for number, column in enumerate(columns)
        )
        for row in range(result.ntuples)
    )


def _value(value: bytes | None, name: bytes, type_: int) -> Hashable:
    if value is None:
        return None
    if type_ == TID:
        return _places.setdefault(value.decode(), len(_places))
    if name in NAMES_OF_THE_SERVER:
        return _names.setdefault((name, value), len(_names))
    if type_ != TIMESTAMPTZ and not WRITTEN_TIME.fullmatch(value):
        return value
    text = value.decode()
    return round(
        (
            datetime.fromisoformat(text).astimezone(UTC) - datetime.now(UTC)
        ).total_seconds()
        / HOUR
    )


_places: dict[str, int] = {}  # where an actor was told that a row is, in a schedule
# of sessions and transactions that an actor was told of, in a schedule
_names: dict[tuple[bytes, bytes], int] = {}


def place(value: str | None) -> int | None:
    """Which of the places that somebody was told of, if it is one: whoever looks there
    finds the row.
    """
    return _places.get(value or "")


def pause(seconds: float) -> None:
    """In place of ``time.sleep``, for actors: nobody else has anything to wait for."""
    if seconds:
        Actor.here.actor.ask_again()


def token() -> Any:
    """In place of ``uuid4``: never used twice in a schedule, and the same when the
    schedule is played again.
    """
    actor = getattr(Actor.here, "actor", OUTSIDE)
    actor.tokens += 1
    return UUID(
        bytes=hashlib.sha256(f"{actor.name} {actor.tokens}".encode()).digest()[:16]
    )


# --- Schedules ------------------------------------------------------------------------


@dataclass
class Found:
    """What an exploration found."""

    schedules: int = 0  # played to their end
    cut: int = 0  # ended where a known state was reached
    states: int = 0
    kills: int = 0
    steps: int = 0
    diverged: int = 0  # went another way, were judged all the same, and played again
    missed: int = 0  # went another way each time
    outcomes: set[Any] = field(default_factory=set)
    # the actors that ever waited for a lock
    waited: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules and {self.cut} cut short, {self.states}"
            f" states, {self.kills} kills, {self.steps} steps, {len(self.outcomes)}"
            f" outcomes, {self.diverged} diverged, {self.missed} missed"
        )


@dataclass
class Explorer:
    """Plays ``works`` (name → work) in every order.

    ``prepare`` makes the world anew before each schedule. ``look`` reads the state of
    the rows, and raises if a law is broken. ``watch`` is told after each step whose it
    was, with the rows before and after it. ``finish`` gets the answers and judges.
    ``when_idle`` lets time pass once all that is left to do is to wait. ``kills``: so
    many actors die, each before every one of its statements. ``prune=False`` goes
    through known states, too.
    """

    works: dict[str, Work]
    prepare: Work
    look: Callable[[], Hashable]
    finish: Callable[[dict[str, Any]], Hashable]
    watch: Callable[[str, Any, Any], object] = lambda mover, before, after: None
    when_idle: Work | None = None
    kills: int = 0
    prune: bool = True
    most: int = 100_000

    def explore(self) -> Found:
        self.moved = threading.Condition()
        self.actors = {name: Actor(name, self.moved) for name in self.works}
        self.found, self.known, self.looked = (
            Found(),
            set[Hashable](),
            dict[tuple[str, ...], Hashable](),
        )
        # nothing here has to survive a crash of the server
        _tell("SET synchronous_commit = off")
        try:
            todo: list[tuple[str, ...]] = [()]
            while todo:
                todo += self._play_if_it_can_be(todo.pop())
                assert self.found.schedules + self.found.cut <= self.most, (
                    "more schedules than expected"
                )
        finally:
            self._end()
            _tell("RESET synchronous_commit")
        self.found.states = len(self.known)
        return self.found

    def _play_if_it_can_be(self, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
        for _try in range(TRIES):
            try:
                return self._play(prefix)
            except Diverged:
                self.found.diverged += 1
        self.found.missed += 1
        return []

    def _play(self, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
        """One schedule, that begins with ``prefix``; the prefixes that it leaves to be
        played.

        One that diverges goes on as it may to its end, because a law that it breaks is
        broken.
        """
        self._reset()
        played: list[str] = []
        left: list[tuple[str, ...]] = []
        diverged = False
        try:
            while choices := self._choices():
                diverged = diverged or (
                    len(played) < len(prefix) and prefix[len(played)] not in choices
                )
                if diverged:
                    choice = choices[0]
                elif len(played) < len(prefix):
                    choice = prefix[len(played)]
                else:
                    if not self._is_new():
                        self.found.cut += 1
                        return left
                    choice = choices[0]
                    left += [(*played, other) for other in choices[1:]]
                played.append(choice)
                self._step(choice)
            outcome = self.finish(
                {name: actor.result for name, actor in self.actors.items()}
            )
        except AssertionError as error:
            raise Violation(
                f"{error}\n  after {self.found.schedules} schedules, by\n"
                + self._told()
            ) from error
        finally:
            self._abandon()
        if diverged or len(played) < len(prefix):
            raise Diverged
        self.found.schedules += 1
        self.found.outcomes.add(outcome)
        return left

    def _reset(self) -> None:
        OUTSIDE.tokens = 0
        _places.clear()
        _names.clear()
        self.prepare()
        self.killed, self.idled = 0, 0
        self.blocked: list[str] = []
        self.trace: list[str] = []
        with self.moved:
            for name, work in self.works.items():
                self.actors[name].begin(work)
            self.moved.notify_all()
        self._settle()
        self.rows = self._rows_now()

    def _choices(self) -> list[str]:
        """Who can be let go, and who can be killed."""
        waiting = [actor for actor in self.actors.values() if actor.at is not None]
        if not waiting:
            if self.blocked:
                raise Stuck(f"{self.blocked} wait for ever")
            return []
        if all(actor.paused for actor in waiting):
            return [IDLE]
        waiting = [actor for actor in waiting if not self._has_twin_before(actor)]
        able = [actor.name for actor in waiting if not actor.paused]
        return able + [
            f"kill {actor.name}" for actor in waiting if self.killed < self.kills
        ]

    def _has_twin_before(self, actor: Actor) -> bool:
        """Of those with the same work who have done nothing yet, the first goes first:
        they differ in their names.
        """
        before = [
            other
            for other in self.actors.values()
            if other.fresh and other.work is actor.work
        ]
        return actor.fresh and before[0] is not actor

    def _is_new(self) -> bool:
        if not self.prune:
            return True
        actors = tuple(
            (name, actor.seen, actor.at, actor.paused, actor.done)
            for name, actor in self.actors.items()
        )
        state = (actors, tuple(self.blocked), self.killed, self.idled, self.rows)
        if state in self.known:
            return False
        self.known.add(state)
        return True

    def _step(self, choice: str) -> None:
        self.found.steps += 1
        *kill, name = [IDLE] if choice == IDLE else choice.split()
        actor = self.actors.get(name)
        self.trace.append(f"{choice}: {actor.at if actor else ''}")
        if actor is None:
            self._idle()
        elif kill:
            self.killed += 1
            self.found.kills += 1
            self._kill(actor)
        else:
            self._let_go(actor)
        self._settle()
        self._wake(actor)

    def _wake(self, mover: Actor | None) -> None:
        """After a step that may have changed something, those who paused have reason to
        ask again.
        """
        before, self.rows = self.rows, self._rows_now()
        self.watch(mover.name if mover else IDLE, before, self.rows)
        if mover and self.rows != before:
            mover.asks_again = False
        if mover is None or not mover.asks_again:
            for actor in self.actors.values():
                actor.paused = actor.paused and actor is mover

    def _rows_now(self) -> Hashable:
        """A schedule that is begun as one before has been looked at so far."""
        so_far = (
            *self.trace,
            *(f"{name} at {actor.at}" for name, actor in self.actors.items()),
        )
        if so_far not in self.looked:
            self.looked[so_far] = self.look()
        return self.looked[so_far]

    def _idle(self) -> None:
        if self.when_idle is None or self.idled > 3:
            raise Stuck("all wait, and nothing comes")
        self.idled += 1
        self.when_idle()

    def _let_go(self, actor: Actor) -> None:
        with self.moved:
            actor.at, actor.running, actor.fresh = None, True, False
            self.moved.notify_all()

    def _kill(self, actor: Actor) -> None:
        actor.dying = True
        self._let_go(actor)

    def _settle(self) -> None:
        """Until everybody stands at a gate, is done, or waits for a lock of somebody
        who does.
        """
        waited = 0.0
        while True:
            with self.moved:
                if self.moved.wait_for(lambda: not self._moving(), LOOK_AFTER):
                    self.blocked = []
                    return
                moving = self._moving()
            stopped = self._waiting_for_locks(moving)
            if stopped == {actor.name for actor in moving}:
                self.blocked = [name for name in self.blocked if name in stopped]
                self.blocked += sorted(stopped - set(self.blocked))
                self.found.waited |= stopped
                return
            waited += LOOK_AFTER
            assert waited < PATIENCE, "somebody is lost"

    def _moving(self) -> list[Actor]:
        return [
            actor
            for actor in self.actors.values()
            if not actor.done and actor.at is None
        ]

    def _waiting_for_locks(self, actors: list[Actor]) -> set[str]:
        """Those who wait for one of us; for an autovacuum, nobody waits long."""
        pids = {actor.pid: actor.name for actor in actors}
        everybody = [actor.pid for actor in self.actors.values()]
        with monitor.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM unnest(%s::int[]) AS pid WHERE pg_blocking_pids(pid)"
                " && %s::int[]",
                [[*pids], everybody],
            )
            return {pids[pid] for (pid,) in cursor.fetchall()}

    def _abandon(self) -> None:
        with self.moved:
            for actor in self.actors.values():
                if not actor.done:
                    actor.dying, actor.at, actor.running = True, None, True
            self.moved.notify_all()
            self.moved.wait_for(
                lambda: all(actor.done for actor in self.actors.values()), PATIENCE
            )

    def _end(self) -> None:
        with self.moved:
            for actor in self.actors.values():
                actor.work = STOP
            self.moved.notify_all()
        for actor in self.actors.values():
            actor.thread.join(PATIENCE)

    def _told(self) -> str:
        return "\n".join(f"    {line}" for line in self.trace)
