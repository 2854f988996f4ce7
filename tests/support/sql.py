"""Statements of the tests' own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from django.db import connections


def run_sql(sql: str, parameters: Any = None, using: str = "default") -> Any:
    """The rows, if it has any."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else None


def value_of(sql: str, parameters: Any = None, using: str = "default") -> Any:
    """The first column of the only row."""
    ((value, *_others),) = run_sql(sql, parameters, using)
    return value


def sqlite_says(expression: str, now: str) -> str:
    """What SQLite makes of ``expression``, as a cursor gets it, at the time ``now``."""
    at = (expression % ()).replace("'NOW'", "'now'").replace("'now'", f"'{now}'")
    with closing(sqlite3.connect(":memory:")) as sqlite:
        return str(sqlite.execute(f"SELECT {at}").fetchone()[0])
