"""Send the statements of every request to PostgreSQL by one of Django's cursors, with any driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


def execute(statement: str, values: Sequence[Any], connection: Any) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``, on one of Django's connections."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return Result(cursor.fetchone() if cursor.description else None, cursor.rowcount)


def send(statements: Sequence[str], connection: Any) -> None:
    """Execute ``statements``, which have neither values nor results, by one of Django's cursors."""
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def learn(process: int, connection: Any) -> None:
    """Ignore that the server's ``process`` answered, because nothing is prepared here."""
