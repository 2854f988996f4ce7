"""What autovacuum does to the records: when it would run by PostgreSQL's own rule, and
when it ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections

from testproject.benchmarks.paced import Window
from testproject.benchmarks.records import TABLE

OFTEN = 0.05  # seconds
SETTINGS = f"""
SELECT name, coalesce(option_value, setting)::float
FROM pg_settings LEFT JOIN (
    SELECT (pg_options_to_table(reloptions)).* FROM pg_class
        WHERE oid = '{TABLE}'::regclass
) AS stated ON option_name = name
WHERE name ~ '^autovacuum_.*_(threshold|scale_factor)$'
"""
COUNTS = f"""
SELECT n_dead_tup, n_ins_since_vacuum, n_mod_since_analyze, greatest(reltuples, 0)
FROM pg_stat_all_tables JOIN pg_class ON oid = relid WHERE relid = '{TABLE}'::regclass
"""


@dataclass(frozen=True)
class Rule:
    """When autovacuum runs, by
    https://www.postgresql.org/docs/current/routine-vacuuming.html#AUTOVACUUM.
    """

    settings: Mapping[str, float]

    @classmethod
    def of(cls, cursor: Any) -> Rule:
        """Return the rule by the current settings of the server and parameters of the
        table.
        """
        cursor.execute(SETTINGS)
        return cls(dict(cursor.fetchall()))

    def due(self, cursor: Any) -> tuple[bool, bool]:
        """Return whether it would vacuum, and whether it would analyze, if it looked
        now.
        """
        cursor.execute(COUNTS)
        dead, inserted, modified, rows = cursor.fetchone()
        vacuum = dead > self._threshold("vacuum", rows) or inserted > self._threshold(
            "vacuum_insert", rows
        )
        return vacuum, modified > self._threshold("analyze", rows)

    def _threshold(self, kind: str, rows: float) -> float:
        return (
            self.settings[f"autovacuum_{kind}_threshold"]
            + self.settings[f"autovacuum_{kind}_scale_factor"] * rows
        )


@contextmanager
def watched(name: str) -> Iterator[list[Window]]:
    """Yield a list of when the table was being vacuumed, by the monotonic clock. It is
    filled during the block.
    """
    windows: list[Window] = []
    ends = threading.Event()
    thread = threading.Thread(target=_watch, args=(name, windows, ends))
    thread.start()
    try:
        yield windows
    finally:
        ends.set()
        thread.join()


def _watch(name: str, windows: list[Window], ends: threading.Event) -> None:
    running = False
    try:
        with connections[name].cursor() as cursor:
            while not ends.wait(OFTEN):
                before, running = running, is_running(cursor)
                if running and not before:
                    windows.append((time.monotonic(), time.monotonic()))
                elif running or before:
                    windows[-1] = windows[-1][0], time.monotonic()
    finally:
        connections[name].close()


def is_running(cursor: Any) -> bool:
    cursor.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_progress_vacuum WHERE relid ="
        f" '{TABLE}'::regclass)"
    )
    return bool(cursor.fetchone()[0])


def settle(cursor: Any, patience: float = 120) -> None:
    """Wait until autovacuum has nothing to do for the table."""
    rule, deadline = Rule.of(cursor), time.monotonic() + patience
    while is_running(cursor) or rule.due(cursor)[0]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Autovacuum had not done its work after {patience:.0f} s."
            )
        time.sleep(OFTEN)
