"""How PostgreSQL is given the statements of every request by a cursor of Django's, with whatever driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import connections


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


def execute(statement: str, values: Sequence[Any], using: str) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``."""
    with connections[using].cursor() as cursor:
        cursor.execute(statement, values)
        return Result(cursor.fetchone() if cursor.description else None, cursor.rowcount)


def learn(process: int, using: str) -> None:
    """Take no note that the server's ``process`` answered: nothing is prepared here."""
