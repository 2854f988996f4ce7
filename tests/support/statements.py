"""What goes over the wire to PostgreSQL, transaction statements included, by libpq's
own trace.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import connection

# A message to the server ("F") that carries a statement, up to the next message from
# either side; or one that executes a statement by the name under which it was prepared;
# or the end of what goes to the server together.
SENT = re.compile(
    r'^F\t\d+\t(?:(?P<kind>Query|Parse)\t(?P<text>.*?)(?=^[FB]\t\d+\t|\Z)|Bind\t ""'
    r' "(?P<name>[^"]+)"'
    r"|(?P<sync>Sync))",
    re.MULTILINE | re.DOTALL,
)
PREPARING = re.compile(r'\s*"[^"\s]+"\s+"')
TRANSACTION = re.compile(
    r"(?:BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|START TRANSACTION|SET TRANSACTION)\b"
)


@dataclass
class Statements:
    """All that was sent, by round trips; complete once the block is left."""

    round_trips: list[list[str]] = field(default_factory=list)

    @property
    def all(self) -> list[str]:
        """All statements, in order. To prepare one does not count."""
        return [statement for together in self.round_trips for statement in together]

    @property
    def transaction(self) -> list[str]:
        """Those that begin, end or divide a transaction."""
        return [statement for statement in self.all if TRANSACTION.match(statement)]

    @property
    def data(self) -> list[str]:
        """The rest: those that read or write."""
        return [statement for statement in self.all if not TRANSACTION.match(statement)]

    def on(self, text: str) -> list[str]:
        """Those that name ``text``."""
        return [statement for statement in self.all if text in statement]


@contextmanager
def sent_statements() -> Iterator[Statements]:
    """Collect the statements that this thread's connection sends to PostgreSQL inside
    the block.
    """
    from psycopg import pq

    connection.ensure_connection()
    pgconn = connection.connection.pgconn
    statements = Statements()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        pgconn.trace(log.fileno())
        pgconn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield statements
        finally:
            pgconn.untrace()
            log.seek(0)
            statements.round_trips += _round_trips(log.read(), _prepared(pgconn))


def _round_trips(log: str, prepared: dict[str, str]) -> list[list[str]]:
    """Group the statements by what ends their message or pipeline: Query does itself,
    all others wait for Sync.
    """
    found: list[list[str]] = [[]]
    for sent in SENT.finditer(log):
        if sent["name"]:
            found[-1].append(prepared.get(sent["name"], sent["name"]))
        elif sent["kind"] == "Query" or (
            sent["kind"] and not PREPARING.match(sent["text"])
        ):
            found[-1].append(_statement(sent["text"]))
        if sent["sync"] or sent["kind"] == "Query":
            found.append([])
    return [together for together in found if together]


def _prepared(pgconn: Any) -> dict[str, str]:
    from psycopg import pq

    if pgconn.status != pq.ConnStatus.OK:
        return {}
    result = pgconn.exec_(b"SELECT name, statement FROM pg_prepared_statements")
    rows = (
        (result.get_value(row, 0), result.get_value(row, 1))
        for row in range(result.ntuples)
    )
    return {name.decode(): statement.decode().strip() for name, statement in rows}


def _statement(traced: str) -> str:
    """``"name" "SELECT …" 0`` of a Parse, or `` "SELECT …"`` of a Query, without its
    quotes.
    """
    return re.sub(r'^\s*"(?:[^"\s]*"\s+")?|"[\s\d]*$', "", traced).strip()


Plan = dict[str, Any]  # as PostgreSQL explains one in JSON


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(plan: Plan) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@contextmanager
def explaining(
    words: str, options: str = "ANALYZE, BUFFERS", only: tuple[str, ...] = ("",)
) -> Iterator[list[Plan]]:
    """The plans, as they are sent, of this thread's statements with these words that
    begin with one of ``only``.
    """
    plans: list[Plan] = []

    def explain(execute: Any, sql: str, params: Any, *details: Any) -> Any:
        if words in sql and sql.lstrip().startswith(only):
            with connection.connection.cursor() as cursor:
                if connection.in_atomic_block:  # elsewhere it only reads
                    cursor.execute("SAVEPOINT explained")
                cursor.execute(f"EXPLAIN ({options}, FORMAT JSON) {sql}", params)
                plans.append(cursor.fetchone()[0][0]["Plan"])
                if connection.in_atomic_block:
                    cursor.execute("ROLLBACK TO explained")
        return execute(sql, params, *details)

    with connection.execute_wrapper(explain):
        yield plans
