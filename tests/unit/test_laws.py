"""The table of the laws in the page on correctness: each law is held by tests, for each kind of claim."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "evidence" / "correctness.md").read_text().partition("## Law by law")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| L")]
LOCKS = re.compile(r"by_lock|BY_LOCK|in_each_mode|of_both_kinds|claim=\"lock\"")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_law_has_its_tests_for_both_kinds_of_claim():
    assert [law.split()[0] for law, *_cells in ROWS] == [f"L{number}" for number in range(1, 14)]
    assert all(NAMED.search(record) and NAMED.search(lock) for _law, record, lock in ROWS)


def test_the_table_of_laws_names_tests_that_exist_and_of_locks_for_locks():
    for _law, record, lock in ROWS:
        for path, name in NAMED.findall(record + lock):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name
        for path, name in NAMED.findall(lock):
            assert re.search(
                r"\bby_lock\b|BY_LOCK|in_each_mode|of_both_kinds|claim=\"lock\"", (ROOT / path).read_text()
            ), name
