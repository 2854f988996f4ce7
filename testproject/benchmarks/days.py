"""Ten days at a constant rate in as many seconds, by a clock that is set ahead: does the table keep its size?

Records are claimed and completed a few at a time, as many as are in flight at once, cleaned up every ten minutes, and
vacuumed when autovacuum would have: its rule is asked once a minute.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import django
from django.db import connection

from testproject.benchmarks import autovacuum, clock, growth, servers
from testproject.benchmarks.cluster import Cluster

NAME = "default"
DATABASE = servers.database("days")
DAYS = 10
MINUTES = 24 * 60
IN_FLIGHT = 20
CHECKPOINT_EVERY = 5  # minutes
CLEANUP_EVERY = 10
TABLE = growth.TABLE


def days(cluster: Cluster, *, keys: int) -> dict[str, Any]:
    """Run ``keys`` a day, kept for one day, with and without the parameters that the migration sets."""
    migrated = import_module("django_idempotency.migrations.0001_create_record").PARAMETERS
    changes = {
        "as migrated": "",
        "PostgreSQL's defaults": f"RESET ({', '.join(migrated)})",
    }
    return {title: lived(cluster, keys, change) for title, change in changes.items()}


def lived(cluster: Cluster, keys: int, change: str) -> Any:
    with servers.tables(cluster, DATABASE):
        return servers.figures(__name__, {"keys": keys, "change": change}, cluster, DATABASE)


# --- In a process of its own, which is a project with this package ---------------------------------------------------

NOW = "statement_timestamp()"
KEPT = {"expires_at": f"{NOW} + interval '1 day'", "purge_at": f"{NOW} + interval '1 day' + random() * interval '1 s'"}
CLAIM = {"id": "gen_random_uuid()", "locked_until": f"{NOW} + interval '60 s' + random() * interval '1 s'"}
CLAIM |= KEPT | dict.fromkeys(("created_at", "locked_at", "updated_at"), NOW)
COMPLETE = KEPT | {"updated_at": NOW} | dict.fromkeys(("token", "locked_at", "locked_until"), "NULL")
WAL = re.compile(r"WAL usage: (\d+) records, .* (\d+) bytes")  # one line for the table, and one for its TOAST table
SIZES = f"""
SELECT pg_relation_size('{TABLE}') / 1e6 AS heap,
    {", ".join(f"pg_relation_size('idempotency_record_{name}') / 1e6 AS {name}" for name in ("reap", "purge"))},
    pg_relation_size('{TABLE}_pkey') / 1e6 AS pkey,
    pg_total_relation_size('{TABLE}') / 1e6 AS total, n_dead_tup AS dead, (SELECT count(*) FROM {TABLE}) AS rows
FROM pg_stat_all_tables WHERE relid = '{TABLE}'::regclass
"""


def main(order: str) -> None:
    asked = json.loads(order)
    django.setup()
    with connection.cursor() as cursor:
        print(json.dumps(list(_live(cursor, asked["keys"], asked["change"]))))


def _live(cursor: Any, keys: int, change: str) -> Iterator[dict[str, float]]:
    _prepare(cursor)
    cursor.execute(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = off)")
    if change:
        cursor.execute(f"ALTER TABLE {TABLE} {change}")
    rule = autovacuum.Rule.of(cursor)
    for day in range(DAYS):
        before = _wal(cursor)
        vacuums = list(_day(cursor, day * MINUTES, keys, rule))
        written = _wal(cursor) - before
        yield {
            "day": day + 1,
            **_sizes(cursor),
            "wal": written / keys,
            "vacuums": len(vacuums),
            **{figure: sum(vacuum[figure] for vacuum in vacuums) for figure in ("seconds", "changed", "vacuum_wal")},
        }


def _prepare(cursor: Any) -> None:
    """Prepare the statements of a key, for several keys at once."""
    from django_idempotency.models import IdempotencyRecord

    columns = [field.attname for field in IdempotencyRecord._meta.concrete_fields]
    for name, id in (("claimed", growth.claim_one(NAME)), ("completed", growth.run_one(NAME)[0])):
        cursor.execute(f"CREATE TEMPORARY TABLE {name} AS SELECT * FROM {TABLE} WHERE id = %s", [id])
    cursor.execute(f"TRUNCATE {TABLE}")
    clock.install(cursor)
    cursor.execute("SET synchronous_commit = off")
    values = ", ".join(CLAIM.get(column, column) for column in columns)
    cursor.execute(
        f"PREPARE claim (int) AS INSERT INTO {TABLE} ({', '.join(columns)}) "
        f"SELECT {values} FROM claimed, generate_series(1, $1) RETURNING id"
    )
    answer = ("status", "response_status", "response_headers", "response_body")
    changes = COMPLETE | {column: f"completed.{column}" for column in answer}
    cursor.execute(
        f"PREPARE complete (uuid[]) AS UPDATE {TABLE} AS record "
        f"SET {', '.join(f'{column} = {value}' for column, value in changes.items())} "
        "FROM completed WHERE record.id = ANY ($1)"
    )


def _day(cursor: Any, begins: int, keys: int, rule: autovacuum.Rule) -> Iterator[dict[str, float]]:
    """Run a day; yield its vacuums."""
    from django_idempotency.maintenance.cleaner import cleanup

    for minute in range(MINUTES):
        clock.put(cursor, minutes=begins + minute)
        _run(cursor, (minute + 1) * keys // MINUTES - minute * keys // MINUTES)
        if minute % CHECKPOINT_EVERY == 0:
            cursor.execute("CHECKPOINT")
        if minute % CLEANUP_EVERY == 0:
            cleanup(pause=0)
        cursor.execute("SELECT pg_stat_force_next_flush()")
        vacuum, analyze = rule.due(cursor)
        if vacuum:
            yield _vacuum(cursor)
        if analyze:
            cursor.execute(f"ANALYZE {TABLE}")


def _run(cursor: Any, keys: int) -> None:
    while keys > 0:
        cursor.execute("EXECUTE claim (%s)", [min(keys, IN_FLIGHT)])
        cursor.execute("EXECUTE complete (%s)", [[id for (id,) in cursor.fetchall()]])
        keys -= IN_FLIGHT


def _vacuum(cursor: Any) -> dict[str, float]:
    told: list[str] = []
    with _hearing(told):
        begun = time.perf_counter()
        cursor.execute(f"VACUUM (VERBOSE) {TABLE}")
        took = time.perf_counter() - begun
    records, written = (sum(map(int, numbers)) for numbers in zip(*WAL.findall("\n".join(told)), strict=True))
    return {"seconds": took, "changed": records, "vacuum_wal": written / 1e6}


@contextmanager
def _hearing(told: list[str]) -> Iterator[None]:
    def hear(notice: Any) -> None:
        told.append(notice.message_primary or "")

    wire: Any = connection.connection
    wire.add_notice_handler(hear)
    try:
        yield
    finally:
        wire.remove_notice_handler(hear)


def _sizes(cursor: Any) -> dict[str, float]:
    cursor.execute(SIZES)
    names = [column.name for column in cursor.description]
    return dict(zip(names, map(float, cursor.fetchone()), strict=True))


def _wal(cursor: Any) -> int:
    cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
    return int(cursor.fetchone()[0])


if __name__ == "__main__":
    main(sys.argv[1])
