"""The promises by database, and the laws by kind of claim: each names a test that runs
there, or a check.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import rows, section, text

ROOT = Path(__file__).parents[2]
EVIDENCE = section("evidence/correctness.md", "Promises by database")
CHECKS = (ROOT / "docs" / "checks.md").read_text()
# By column: the markers of tests that are left out on that database.
LEFT_OUT = {
    "PostgreSQL": {"mariadb", "other_databases"},
    "MariaDB ≥ 10.6": {"postgresql", "psycopg2", "pgbouncer"},
    "SQLite": {"postgresql", "mariadb", "row_locks", "psycopg2", "pgbouncer", "server"},
}


def cells(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


COLUMNS, _rule, *PROMISES = cells(EVIDENCE)
CELLS = [
    pytest.param(column, cell, id=f"{promise}-{column}")
    for promise, *by_column in PROMISES
    for column, cell in zip(COLUMNS[1:], by_column, strict=True)
]
NAMED = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def markers(nodes: list[ast.expr]) -> set[str]:
    """The names in decorators, or in ``pytestmark``: ``pytest.mark.postgresql`` and
    ``postgresql`` are the same.
    """
    inner = [node for each in nodes for node in ast.walk(each)]
    attributes = {node.attr for node in inner if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in inner if isinstance(node, ast.Name)}


def of_module(path: str) -> set[str]:
    assigned = [node for node in tree(path).body if isinstance(node, ast.Assign)]
    return markers(
        [
            node.value
            for node in assigned
            if getattr(node.targets[0], "id", "") == "pytestmark"
        ]
    )


def of_test(path: str, name: str) -> set[str]:
    found = [node for node in tree(path).body if getattr(node, "name", "") == name]
    assert found, f"{path} has no {name}"
    return markers(found[0].decorator_list)


def test_the_table_has_a_column_for_each_database_of_the_suite():
    assert COLUMNS[1:] == list(LEFT_OUT)
    assert len(PROMISES) > 10


@pytest.mark.parametrize(("column", "cell"), CELLS)
def test_a_cell_names_what_holds_it(column, cell):
    for named in NAMED.findall(cell):
        path, _, name = named.partition("::")
        assert (ROOT / path).is_file(), path
        marked = of_module(path) | (of_test(path, name) if name else set())
        assert not marked & LEFT_OUT[column], f"{named} does not run on {column}"
    for check in re.findall(r"`([EW]\d{3})`", cell):
        assert f"### {check}: " in CHECKS
    assert NAMED.search(cell) or re.search(r"[a-z]{3}", cell), "a cell says nothing"


def test_the_page_on_databases_says_yes_only_where_a_test_holds_the_promise():
    columns, _rule, *stated = cells(text("databases.md"))
    assert columns == COLUMNS
    assert [promise for promise, *_ in stated] == [promise for promise, *_ in PROMISES]
    for (promise, *said), (_promise, *held) in zip(stated, PROMISES, strict=True):
        for word, cell in zip(said, held, strict=True):
            assert word in (["yes", "no"] if NAMED.search(cell) else [cell]), promise


LAWS = rows(section("evidence/correctness.md", "Law by law"))
BY_LOCK = re.compile(r"\bby_lock\b|BY_LOCK|in_each_mode|of_both_kinds|claim=\"lock\"")


def test_every_law_has_its_tests_for_both_kinds_of_claim():
    assert [law.split()[0] for law, *_cells in LAWS] == [
        f"L{number}" for number in range(1, 14)
    ]
    for _law, record, lock in LAWS:
        assert "::" in record
        assert "::" in lock
        for named in NAMED.findall(lock):
            assert BY_LOCK.search((ROOT / named.partition("::")[0]).read_text()), named
