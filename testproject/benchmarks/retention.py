"""Keeping the table small while it is in use: cleaning up beside claims, and how much
the reaper reads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import django
from django.db import connection, connections, transaction

from testproject.benchmarks import autovacuum, paced, records, servers
from testproject.benchmarks.cluster import Cluster

NAME = "default"  # the alias of the database in the process that measures
DATABASE = servers.database("retention")

RATE = 500  # keys a second
ROUNDS = 4
QUIET = 20  # seconds of a quiet phase
# ms; a higher p99 in quiet phases says more about the machine than about anything else
CALM = 20
SETTLING = 2  # seconds from a checkpoint to the phase after it
# Autovacuum has to do a phase's work within the phase; its reads must not count as the
# reaper's.
SETTINGS = {"cleanup": {"autovacuum_naptime": "5s"}, "reaper": {"autovacuum": "off"}}

Phase = dict[str, Any]
KINDS = ("quiet", "cleaning", "computing")
COMPUTE = """
DO $$ DECLARE
    ends timestamptz := clock_timestamp() + interval '{seconds} s';
BEGIN
    WHILE clock_timestamp() < ends LOOP END LOOP;
END $$
"""

STUCK = 100
DAYS_STUCK = (1, 3, 5)  # for each of the passes, of the ``STUCK`` records


def measure(part: str, cluster: Cluster, **order: Any) -> dict[str, Any]:
    with cluster.setting(**SETTINGS[part]), servers.tables(cluster, DATABASE):
        figures: dict[str, Any] = servers.figures(
            __name__, {"part": part, **order}, cluster, DATABASE
        )
        return figures


# --- In a process of its own, which is a project with this package --------------------


def main(order: str) -> None:
    asked = json.loads(order)
    django.setup()
    print(json.dumps(PARTS[asked.pop("part")](**asked)))


# --- Cleaning up beside claims --------------------------------------------------------


def cleanup(rows: int, kept: int) -> dict[str, Any]:
    """Delete ``rows`` beside claims, in phases that alternate with quiet ones and with
    ones that only compute.
    """
    fill_with_due(rows, kept)
    phases: list[Phase] = []
    with paced.load(NAME, rate=RATE) as load, autovacuum.watched(NAME) as vacuums:
        _phase("settling", lambda: time.sleep(SETTLING))
        for _ in range(ROUNDS):
            phases.append(_phase("quiet", lambda: time.sleep(QUIET)))
            phases.append(_phase("cleaning", lambda: _clean(rows // ROUNDS)))
            phases.append(_phase("computing", partial(_compute, phases[-1])))
    return _told(phases, load, vacuums)


def fill_with_due(rows: int, kept: int) -> None:
    """Write records in the order they came: ``rows`` that are to be deleted, then
    ``kept`` ones.
    """
    completed = records.run_one(NAME)[0]
    with records.filling(NAME) as cursor:
        age = "- interval '3 days' + i * interval '1 ms'"
        records.copy(
            cursor,
            completed,
            rows,
            expires_at=f"expires_at {age}",
            purge_at=f"purge_at {age}",
        )
        records.copy(cursor, completed, kept, purge_at="purge_at + i * interval '1 ms'")


def _phase(kind: str, act: Callable[[], Any]) -> Phase:
    """Run a phase after a checkpoint, so that each phase pays for its own page
    images.
    """
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")
    time.sleep(SETTLING)
    before, begun = _written(), time.monotonic()
    figures = act() or {}
    ended, after = time.monotonic(), _written()
    seconds = ended - begun
    written = {name: (after[name] - before[name]) / seconds for name in after}
    return {
        "kind": kind,
        "begun": begun,
        "ended": ended,
        "seconds": seconds,
        **written,
        **figures,
    }


def _written() -> dict[str, float]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_current_wal_insert_lsn() - '0/0', wal_fpi FROM pg_stat_wal"
        )
        wal, images = cursor.fetchone()
    return {"wal": float(wal) / 1e6, "images": float(images)}


def _clean(rows: int) -> dict[str, Any]:
    """Delete this many ``rows``, and let autovacuum do the work that this leaves."""
    from django_idempotency.conf import conf
    from django_idempotency.maintenance import Swept, cleanup

    pause = conf().sweep_pause
    batches = 1

    def go_on(swept: Swept) -> bool:
        nonlocal batches
        batches += swept.rows < rows
        return swept.rows < rows

    begun = time.monotonic()
    deleted = cleanup(go_on=go_on).rows
    ended = time.monotonic()
    with connection.cursor() as cursor:
        autovacuum.settle(cursor)
    work = (ended - begun) / batches - pause
    deleting = {
        "deleted": deleted,
        "deleting": (begun, ended),
        "deleted_rate": deleted / (ended - begun),
    }
    return {**deleting, "batches": batches, "work": work, "pause": pause}


def _compute(cleaning: Phase) -> None:
    """Keep one of the database's processors busy for as long as the batches did,
    without touching data.
    """
    with connection.cursor() as cursor:
        for _ in range(cleaning["batches"]):
            cursor.execute(COMPUTE.format(seconds=cleaning["work"]))
            time.sleep(cleaning["pause"])


def _told(
    phases: list[Phase], load: paced.Load, vacuums: Sequence[paced.Window]
) -> dict[str, Any]:
    for phase in phases:
        phase["vacuums"] = [
            (begun, ended)
            for begun, ended in vacuums
            if phase["begun"] <= begun < phase["ended"]
        ]
        busy = (
            [phase["deleting"], *phase["vacuums"]]
            if "deleting" in phase
            else [(phase["begun"], phase["ended"])]
        )
        phase |= {"windows": busy, **paced.percentiles(load.within(busy))}
    quiet, cleaning, computing = (
        [phase for phase in phases if phase["kind"] == kind] for kind in KINDS
    )
    windows = {
        "quiet": [window for phase in quiet for window in phase["windows"]],
        "cleaning": [window for phase in cleaning for window in phase["windows"]],
        "– deleting": [phase["deleting"] for phase in cleaning],
        "– vacuuming": [window for phase in cleaning for window in phase["vacuums"]],
        "computing as long": [
            window for phase in computing for window in phase["windows"]
        ],
    }
    told = {kind: _figures(load, of) for kind, of in windows.items()}
    for figures in told.values():
        figures["ratio"] = figures["p99"] / told["quiet"]["p99"]
    for kind, of in (
        ("quiet", quiet),
        ("cleaning", cleaning),
        ("computing as long", computing),
    ):
        told[kind] |= {
            name: median(phase[name] for phase in of) for name in ("wal", "images")
        }
    told["– deleting"]["deleted_rate"] = median(
        phase["deleted_rate"] for phase in cleaning
    )
    ratios = [
        after["p99"] / before["p99"]
        for before, after in zip(quiet, cleaning, strict=True)
    ]
    return {
        "summary": told,
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "deleted": sum(phase["deleted"] for phase in cleaning),
        "phases": phases,
    }


def _figures(load: paced.Load, windows: Sequence[paced.Window]) -> dict[str, float]:
    seconds = sum(ended - begun for begun, ended in windows)
    return {"seconds": seconds, **paced.percentiles(load.within(windows))}


# --- What the reaper reads ------------------------------------------------------------


def reaper(rows: int) -> dict[str, Any]:
    """Run passes over a table with ``STUCK`` records whose lease ran out, spread among
    the others.
    """
    completed, claimed = records.run_one(NAME)[0], records.claim_one(NAME)
    with records.filling(NAME) as cursor:
        for number in range(STUCK):
            records.copy(
                cursor, completed, (number + 1) * rows // STUCK - number * rows // STUCK
            )
            for days in DAYS_STUCK:
                records.copy(
                    cursor,
                    claimed,
                    1,
                    locked_until=f"locked_until - interval '{days} days'",
                )
        records.copy(
            cursor, claimed, 1, locked_until="locked_until - interval '9 days'"
        )
        cursor.execute(f"DELETE FROM {records.TABLE} WHERE id = %s", [claimed])
    assert _reap(8)[0] == 1  # makes the session look up what it looks up once
    statements: dict[str, dict[str, float]] = {}
    with connection.execute_wrapper(explaining(statements)):
        first, _figures = _reap(4)
    second, there = _reap(2)
    connection.close()
    third, new = _reap(0)
    assert first == second == third == STUCK
    told = {
        **statements,
        "all, in a session that is there": there,
        "all, in a new session": new,
    }
    return {"rows": rows, "stuck": STUCK, "told": told}


def _reap(days: int) -> tuple[int, dict[str, float]]:
    """Reap; return how many records were stuck for longer than ``days``, and what that
    took.
    """
    from django_idempotency.maintenance.reaper import reap

    before, begun = _buffers(), time.perf_counter()
    reaped = reap(older_than=days * 86400)
    took = time.perf_counter() - begun
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
    return reaped.done["failed"], {"buffers": _buffers() - before, "ms": took * 1000}


def _buffers() -> int:
    """Return the buffers of everything in the database, asked from another one."""
    database = connections.databases[NAME]["NAME"]
    connections.databases["elsewhere"] = {
        **connections.databases[NAME],
        "NAME": "postgres",
    }
    with connections["elsewhere"].cursor() as cursor:
        cursor.execute(
            "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = %s",
            [database],
        )
        return int(cursor.fetchone()[0])


def explaining(told: dict[str, dict[str, float]]) -> Callable[..., Any]:
    """Have EXPLAIN count each statement's buffers before the statement is run for
    real.
    """
    titles = {"SELECT": "finding and locking them", "UPDATE": "writing them"}

    def wrapper(execute: Any, sql: str, values: Any, *details: Any) -> Any:
        title = titles.get(sql.partition(" ")[0])
        if title and records.TABLE in sql:
            with transaction.atomic(), connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", values)
                plan = cursor.fetchone()[0][0]["Plan"]
                transaction.set_rollback(True)
            told[title] = {
                "buffers": plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
            }
        return execute(sql, values, *details)

    return wrapper


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"cleanup": cleanup, "reaper": reaper}

if __name__ == "__main__":
    main(sys.argv[1])
