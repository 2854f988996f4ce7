"""The relay's rate while a transaction holds ``xmin``, relative to its rate in a database where none does.

    python -m testproject.benchmarks.outbox_held --seconds 600

``xmin`` holds back vacuum in its own database only. So there are two databases on one server: ``DATABASE_URL``'s, whose
outbox is emptied, has the long transaction; another, created for this and dropped at the end, has none. One relay each
drains as many events, in turns, so that other load on the machine is the same for both. Both tables are vacuumed every
minute between two turns, as by autovacuum, which may be off. What it can't remove under ``xmin`` stays.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from typing import Any

import django
from django.core.management import call_command
from django.db import connection, connections

from testproject.benchmarks.outbox import CYCLE, TABLE, dead_tuples, fill, holding_xmin, make_relay

VACUUM_EVERY = 60.0
HELD, CALM = "default", "calm"
LOCAL = "django_idempotency.contrib.outbox.publishers.local.LocalPublisher"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="that xmin is held")
    asked = parser.parse_args()
    django.setup()
    with another_database():
        print(json.dumps(measure(asked.seconds)), flush=True)


@contextmanager
def another_database() -> Iterator[None]:
    """Create a migrated database with the alias ``CALM`` on the same server, for the block."""
    name = f"{connection.settings_dict['NAME']}_{CALM}"
    _run(f'DROP DATABASE IF EXISTS "{name}"')
    _run(f'CREATE DATABASE "{name}"')
    connections.settings[CALM] = {**connections.settings[HELD], "NAME": name}
    try:
        call_command("migrate", database=CALM, verbosity=0)
        yield
    finally:
        connections[CALM].close()
        _run(f'DROP DATABASE "{name}"')


def _run(statement: str, using: str = HELD) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(statement)


def measure(seconds: float) -> dict[str, Any]:
    """Return the events a second of each relay, and the held one's rate relative to the calm one's.

    That ratio is given for each fifth of the time, and as quartiles of all turns. Also return the dead rows at the end.
    """
    took: dict[str, list[float]] = {HELD: [], CALM: []}
    with ExitStack() as stack:
        drains = {using: stack.enter_context(_draining(using)) for using in took}
        for drain in drains.values():  # warms up
            drain()
        stack.enter_context(holding_xmin())
        deadline = time.monotonic() + seconds
        vacuumed = time.monotonic()
        while time.monotonic() < deadline:
            if time.monotonic() - vacuumed > VACUUM_EVERY:
                vacuumed = time.monotonic()
                for using in drains:
                    _run(f"VACUUM (ANALYZE) {TABLE}", using)
            for using in sorted(drains, reverse=len(took[HELD]) % 2 == 1):
                took[using].append(drains[using]())
        dead = {using: dead_tuples(TABLE, using) for using in took}
    parts = [calm / held for held, calm in zip(took[HELD], took[CALM], strict=True)]
    low, middle, high = quantiles(parts, n=4)
    return {
        "seconds": round(seconds),
        "events each": len(parts) * CYCLE,
        **{f"{using} events/s": round(CYCLE / median(times)) for using, times in took.items()},
        "held, of calm": {"low": round(low, 2), "median": round(middle, 2), "high": round(high, 2)},
        "by fifths": [round(median(fifth), 2) for fifth in _fifths(parts)],
        "dead rows": dead,
    }


def _fifths(parts: Sequence[float]) -> list[Sequence[float]]:
    size = max(1, len(parts) // 5)
    return [parts[place : place + size] for place in range(0, size * 5, size)]


@contextmanager
def _draining(using: str) -> Iterator[Callable[[], float]]:
    """Yield a function that fills the outbox, has it drained, and returns the seconds that draining took."""
    _run(f"TRUNCATE {TABLE}", using)
    relay = make_relay(LOCAL, using=using, handler=lambda event: None)

    def drain() -> float:
        fill(TABLE, CYCLE, using)
        before, begun = relay.published, time.perf_counter()
        while relay.step():
            pass
        assert relay.published - before == CYCLE
        return time.perf_counter() - begun

    yield drain
    relay.lanes.leave()


if __name__ == "__main__":
    try:
        main()
    finally:
        connections.close_all()
