"""Send the statements of every request by Django's cursors, one by one, with any driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Statement = tuple[str, Sequence[Any]]


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


class Ending(Protocol):
    """A transaction that ends with a statement: whether COMMIT was sent with it, and the error instead of a reply."""

    committing: bool
    error: BaseException | None


def execute(statement: str, values: Sequence[Any], connection: Any, ends: object = None) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``, on one of Django's connections."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return Result(cursor.fetchone() if cursor.description else None, cursor.rowcount)


def together(statements: Sequence[Statement], connection: Any, ends: object = None) -> list[Result]:
    return [execute(statement, values, connection) for statement, values in statements]


def learn(process: int, connection: Any) -> None:
    """Ignore that the server's ``process`` replied, because nothing is prepared here."""
