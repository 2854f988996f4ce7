"""Keep the leases of this process's runs, and find out which leases of other owners
have lapsed.

Each store has one thread for this, with a connection that nothing else uses. The lease
of a live owner lapses, too, if its store was unavailable. So a lease is taken over only
after a process has watched the store for a heartbeat's time, and has seen that the
store was available and that the lease was not renewed.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID
from weakref import ref

from django_idempotency.engine.background import Worker, threads_run
from django_idempotency.reporting.logs import log
from django_idempotency.stores.base import Store
from django_idempotency.values.outcomes import Claimed, Snapshot

T = TypeVar("T")

BEATS_PER_LEASE = 3
RETRY_AFTER = 1.0  # seconds from a failed heartbeat to the next, at most
MOST_SUSPECTS = 1000
# seconds; with less, a busy machine would look like an outage
LEAST_PATIENCE, SHORTEST_GAP, LONGEST_GAP = 1.0, 1.25, 2.5
NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease to keep. ``finished``: the run has ended, but the store has not confirmed
    its verdict yet.

    Such a lease is kept even if the store says that the claim has ended, because a
    failover may bring back an earlier state of the record. ``run``: once this is dead,
    nobody can end the run any more.
    """

    claim: Claimed
    store: Store
    finished: bool = False
    run: ref[object] | None = None


@dataclass(slots=True)
class Suspect:
    """A record of another owner, whose lease may lapse.

    ``lease``: the length of its leases in seconds. ``left``: how long this one was to
    last when it was last read.
    """

    id: UUID
    token: UUID
    store: Store
    lease: float
    left: timedelta

    @property
    def beat(self) -> float:
        return self.lease / BEATS_PER_LEASE

    @property
    def gap(self) -> float:
        """The longest time between two reads, in seconds, for which the store may have
        been unavailable unseen.
        """
        return min(LONGEST_GAP, max(SHORTEST_GAP, self.beat / 2))


def beat(store: Store) -> float:
    """Return the seconds between two heartbeats of a lease."""
    return store.policy.mode.seconds / BEATS_PER_LEASE


class Watch:
    """How long a store has been seen to be available, without a gap.

    A gap is the time between two observations that are too far apart, by the clock of
    either side: the store was unavailable or frozen, or this process was.
    """

    def __init__(self) -> None:
        self._first = self._last = NEVER

    def observe(self, now: float, *, gap: float) -> None:
        if now - self._last > gap:
            self._first = now
        self._last = now

    def interrupt(self) -> None:
        self._first = self._last = NEVER

    @property
    def seconds(self) -> float:
        return 0.0 if self._last == NEVER else self._last - self._first


class LeaseKeeper(Worker):
    """The leases in one store: renewed three times per lease, all in one statement for
    each policy.

    After a failed heartbeat, the next one comes within a second. While another owner's
    lease is suspected, the store is asked several times per heartbeat.
    """

    def reset(self) -> None:
        super().reset()
        self._leases: dict[UUID, HeldLease] = {}
        self._suspects: dict[UUID, Suspect] = {}
        self._watch = Watch()
        self._renewed = self._read_at = time.monotonic()
        self._failed = False

    # --- What requests ask for

    def add(
        self,
        claim: Claimed,
        store: Store,
        *,
        finished: bool = False,
        run: ref[object] | None = None,
    ) -> None:
        """Keep the lease of ``claim``; see ``HeldLease`` for ``finished``.

        Raises ``RuntimeError`` if there is no thread for it and none can be started.
        """
        if not threads_run():
            raise RuntimeError("uWSGI runs no threads: start it with --enable-threads.")
        with self.changed:
            if not self._leases:
                self._renewed, self._failed = time.monotonic(), False
            self._leases[claim.token] = HeldLease(claim, store, finished, run)
            try:
                self.wake()
            except (
                BaseException
            ):  # a lease that is not renewed must not stay in the list
                del self._leases[claim.token]
                raise

    def drop(self, claim: Claimed) -> None:
        with self.changed:
            self._leases.pop(claim.token, None)

    def suspect(self, suspect: Suspect) -> None:
        with self.changed:
            if suspect.token in self._suspects or len(self._suspects) >= MOST_SUSPECTS:
                return
            self._suspects[suspect.token] = suspect
            with suppress(RuntimeError):  # then another caller will find out
                self.wake()

    # --- When

    def due(self) -> float | None:
        times = []
        if self._leases:
            times.append(
                self._renewed + (_retry(self._beat()) if self._failed else self._beat())
            )
        if self._suspects:
            times.append(self._read_at + self._pause())
        return min(times, default=None)

    def _beat(self) -> float:
        return min(beat(lease.store) for lease in self._leases.values())

    def _pause(self) -> float:
        """Return the seconds between two reads of suspects: enough of them per
        heartbeat for a gap to show.
        """
        return min(
            RETRY_AFTER, min(suspect.beat for suspect in self._suspects.values()) / 4
        )

    # --- The heartbeat

    def work(self) -> None:
        with self.changed:
            self._drop_left()
            leases, suspects = [*self._leases.values()], [*self._suspects.values()]
            now = time.monotonic()
            renewal = (
                bool(leases)
                and self._renewed + (0 if self._failed else self._beat()) <= now
            )
        # A statement on a connection that hangs delays the renewal of every lease, so
        # the shortest one is the measure. A look delays only the next look.
        patience = min(
            min((beat(lease.store) for lease in leases), default=math.inf) / 2,
            max(
                LEAST_PATIENCE,
                min((suspect.beat for suspect in suspects), default=math.inf) / 2,
            ),
        )
        if renewal:
            self._renewed = now
            # One statement can renew the leases of the same length in the same schemas.
            groups = _groups(
                leases,
                lambda lease: (lease.store.policy.mode.seconds, lease.store.schemas),
            )
            renewed = [self._renew(group, patience) for group in groups]
            self._failed = not all(renewed)
        if suspects:
            self._read_at = now
            self._check(suspects, patience)

    def _drop_left(self) -> None:
        """Drop the leases of runs that an exception has kept from ending. They lapse,
        as after a crash.
        """
        for lease in [
            lease
            for lease in self._leases.values()
            if lease.run is not None and lease.run() is None
        ]:
            del self._leases[lease.claim.token]
            message = (
                "idempotency record %s: its run was abandoned, and its lease will lapse"
            )
            log(
                logging.WARNING,
                "unended",
                message,
                lease.claim.id,
                operation=lease.claim.operation,
            )

    def _renew(self, group: list[HeldLease], patience: float) -> bool:
        """Renew the leases of ``group``. Return false if the store was unavailable or
        one of the rows is locked.
        """
        claims, store = [lease.claim for lease in group], group[0].store
        left: set[UUID] = {claim.token for claim in claims}

        def renew() -> None:
            left.difference_update(store.renew(claims))
            if left:
                owned = store.leases_left(
                    {claim.token: claim.id for claim in claims if claim.token in left}
                )
                self._lose(left - owned.keys())
                left.intersection_update(owned)

        return self.attempt(renew, store, patience) and not left

    def _lose(self, tokens: set[UUID]) -> None:
        """Drop claims that have another owner by now, or none. Their completion will
        find out, too.
        """
        with self.changed:
            lost = [
                lease
                for token in tokens
                if (lease := self._leases.get(token)) and not lease.finished
            ]
            for lease in lost:
                del self._leases[lease.claim.token]
        for lease in lost:
            log(
                logging.WARNING,
                "lease_lost",
                "idempotency record %s: its lease can't be renewed any more",
                lease.claim.id,
                operation=lease.claim.operation,
                attempt=lease.claim.attempt,
            )

    # --- The watch

    def _check(self, suspects: list[Suspect], patience: float) -> None:
        for group in _groups(suspects, lambda suspect: suspect.store.schemas):
            if not self.attempt(
                partial(self._check_group, group), group[0].store, patience
            ):
                self._watch.interrupt()

    def _check_group(self, group: list[Suspect]) -> None:
        store = group[0].store
        left = store.leases_left({suspect.token: suspect.id for suspect in group})
        self._watch.observe(time.monotonic(), gap=min(suspect.gap for suspect in group))
        lapsed = {
            suspect.token: suspect.id
            for suspect in group
            if suspect.token in left
            and left[suspect.token] < timedelta(0)
            and self._was_watched(suspect)
        }
        if lapsed:
            store.expire(lapsed)
        with self.changed:
            for suspect in group:
                lasts = left.get(suspect.token)
                # ended, renewed or expired
                if lasts is None or lasts > suspect.left or suspect.token in lapsed:
                    self._suspects.pop(suspect.token, None)
                else:
                    suspect.left = lasts

    def _was_watched(self, suspect: Suspect) -> bool:
        """Whether the store was watched for a heartbeat's time besides a gap, which may
        hide an outage.
        """
        return self._watch.seconds >= suspect.beat + suspect.gap


def _retry(beat: float) -> float:
    """Return the seconds to wait after a failed heartbeat, which differ between
    processes.
    """
    return min(RETRY_AFTER, beat / 2) * random.uniform(0.5, 1)


def _groups(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    groups: dict[object, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [*groups.values()]


# --- The keepers of this process ------------------------------------------------------

_keepers: dict[tuple[type[Store], str], LeaseKeeper] = {}


def keeper_of(store: Store) -> LeaseKeeper:
    # a database and another store may have the same alias
    place = type(store), store.name
    keeper = _keepers.get(place) or _keepers.setdefault(place, LeaseKeeper("leases"))
    keeper.reset_after_fork()
    return keeper


def suspect(record: Snapshot, store: Store) -> None:
    """Watch whether the owner of ``record`` renews its lease, so that a retry may take
    over if not.
    """
    assert record.token is not None  # by constraint, all three
    assert record.locked_at is not None
    assert record.locked_until is not None
    # It may have been claimed under another policy. Its lease is no longer than the
    # time from the claim to its end.
    lease = min(
        store.policy.mode.seconds,
        (record.locked_until - record.locked_at).total_seconds(),
    )
    left = record.locked_until - record.now
    keeper_of(store).suspect(Suspect(record.id, record.token, store, lease, left))
