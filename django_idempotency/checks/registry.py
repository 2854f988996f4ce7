"""Checks as data: a row for each, and the loop that runs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage, Tags

from django_idempotency.checks.subjects import Project, Source

DOCS = "https://django-idempotency.readthedocs.io/en/stable"
TAG = "idempotency"
LEVELS = {"E": checks.ERROR, "W": checks.WARNING}
OPTION = re.compile(r"`\w+`")

Found = tuple[Any, Any]


def each(
    part: str, finds: Callable[[Any], Any]
) -> Callable[[Project], Iterator[Found]]:
    """Look at each item of a part of the project, such as ``"views"``.

    ``finds``: returns what is wrong with an item, or nothing; a generator yields
    several findings.
    """

    def find(project: Project) -> Iterator[Found]:
        for it in getattr(project, part):
            found = finds(it)
            yield from (
                (it, one)
                for one in (
                    found if isinstance(found, Iterator) else [found] if found else []
                )
            )

    return find


@dataclass(frozen=True)
class Check:
    """What can be wrong, and how to find it. Rows with the same ``id`` are different
    causes of one problem.

    ``id``: ``E`` for an error or ``W`` for a warning, and a number. ``find``: yields
    items of the project, each with what was found. ``message``, ``hint``: templates for
    ``str.format``, in which these are called ``it`` and ``found``. An option of
    policies in backticks is written as its place does: in capitals in the setting, else
    in lower case. ``database``: it queries databases, so it runs only if they are
    named, as by ``check --database default``. ``deploy``: it runs only under ``check
    --deploy``.
    """

    id: str
    find: Callable[[Project], Iterator[Found]]
    message: str
    hint: str
    database: bool = False
    deploy: bool = False


@dataclass(frozen=True)
class Table:
    """The checks of one app. ``page`` of the documentation has a heading for each
    id.
    """

    label: str
    page: str
    rows: Sequence[Check]


registered: dict[str, Table] = {}


def register(rows: Sequence[Check], *, label: str, page: str) -> None:
    """Have Django run ``rows``. ``label``: that of the app, which prefixes the ids."""
    if label in registered:  # an AppConfig can get ready again
        return
    registered[label] = Table(label, page, rows)
    for database, deploy in product((False, True), repeat=2):
        together = Table(
            label,
            page,
            [row for row in rows if (row.database, row.deploy) == (database, deploy)],
        )
        if together.rows:
            tags = (TAG, Tags.database) if database else (TAG,)
            checks.register(partial(_check, together), *tags, deploy=deploy)


def _check(
    table: Table, databases: Collection[str] | None = None, **_named: object
) -> list[CheckMessage]:
    return run(table, Project(databases or ()))


def run(table: Table, project: Project) -> list[CheckMessage]:
    return [message for row in table.rows for message in _messages(row, table, project)]


def _messages(row: Check, table: Table, project: Project) -> Iterator[CheckMessage]:
    seen: set[str] = set()
    # what views have from the setting is reported once, for the setting
    inherited: set[str] = set()
    for it, found in row.find(project):
        text, hint = (
            _written(template, it, found) for template in (row.message, row.hint)
        )
        what = text.removeprefix(str(it)).casefold()
        if text in seen or what in inherited:
            continue
        seen.add(text)
        inherited.update([what] if isinstance(it, Source) and it.is_setting else [])
        link = f"{DOCS}/{table.page}/#{row.id.lower()}"
        yield CheckMessage(
            LEVELS[row.id[0]], text, f"{hint} See {link}", id=f"{table.label}.{row.id}"
        )


def _written(template: str, it: Any, found: Any) -> str:
    if isinstance(it, Source) and it.is_setting:
        template = OPTION.sub(lambda option: option[0].upper(), template)
    return template.replace("`", "").format(it=it, found=found)
