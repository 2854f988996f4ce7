"""Figures as text, for the terminal and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_idempotency.maintenance.stats import Alarms, ByLock, Due, Pending, Size

LATE = 1800  # seconds; three times the interval of the tasks


@dataclass(frozen=True, slots=True)
class Figure:
    """``alarming``: an operator should look at it; in the admin at the records in ``situation``, if there is one."""

    name: str
    value: str
    alarming: bool = False
    situation: str = ""


def amount(number: float | None, most: float | None = None) -> str:
    """Return ``12,345``, or ``12,345 or more`` if ``number`` is ``most``, at which counting stops."""
    if number is None:
        return _("unknown")
    shown = number_format(round(number), force_grouping=True)
    return _("%(number)s or more") % {"number": shown} if number == most else shown


def share(part: float) -> str:
    return f"{_two_places(part * 100)} %"


def _two_places(number: float) -> str:
    return number_format(f"{number:.2f}")


def volume(bytes: float | None) -> str:
    return _("unknown") if bytes is None else filesizeformat(round(bytes)).replace("\xa0", " ")


_UNITS = ((24 * 3600, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return ``0.25 s``, ``42 s`` or ``3 h 7 min``: at most the two largest units."""
    if seconds < 10:
        return f"{_two_places(seconds)} s" if seconds else "0 s"
    rest, parts = round(seconds), []
    for unit, name in _UNITS:
        number, rest = divmod(rest, unit)
        parts.append((number, name))
    first = next(place for place, (number, _name) in enumerate(parts) if number)
    return " ".join(f"{number} {name}" for number, name in parts[first : first + 2] if number)


def age(seconds: float) -> str:
    """Return ``3 s``, ``42 s`` or ``3 h 7 min``: like ``duration``, but in whole seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 10 else duration(whole)


def sizes(size: Size) -> list[Figure]:
    dead = f"{amount(size.dead_rows)} ({volume(size.dead_bytes)})"
    return [
        Figure(_("rows"), amount(size.rows)),
        Figure(_("size"), volume(size.bytes)),
        Figure(_("of which table"), volume(size.table_bytes)),
        Figure(_("of which indexes"), volume(size.index_bytes)),
        Figure(_("dead rows"), _("unknown") if size.dead_rows is None else dead),
    ]


def waiting(pending: Pending, most: float) -> list[Figure]:
    return [
        Figure(_("pending"), amount(pending.pending, most)),
        Figure(_("age, p50"), duration(pending.pending_p50)),
        Figure(_("age, p95"), duration(pending.pending_p95)),
        Figure(_("age, p99"), duration(pending.pending_p99)),
        Figure(_("oldest"), duration(pending.pending_oldest)),
        *_by_lock(pending),
        *alarming(pending, most),
    ]


def alarming(alarms: Alarms, most: float | None = None) -> list[Figure]:
    return [
        Figure(_("lease ran out"), amount(alarms.stuck, most), alarming=bool(alarms.stuck), situation="stuck"),
        Figure(
            _("on hold for an operator"),
            amount(alarms.on_hold, most),
            alarming=bool(alarms.on_hold),
            situation="on_hold",
        ),
    ]


def _by_lock(found: ByLock) -> list[Figure]:
    if found.pending_by_lock is None:
        return []
    oldest = found.pending_by_lock_oldest
    return [
        Figure(_("pending by lock"), amount(found.pending_by_lock)),
        Figure(_("oldest by lock"), _("unknown") if oldest is None else duration(oldest)),
    ]


def backlog(due: Due, most: float) -> list[Figure]:
    """Return what the clean-up has still to do. A lag of more than ``LATE`` seconds is alarming."""
    return [
        Figure(_("due for deletion"), amount(due.due, most)),
        Figure(_("behind"), duration(due.lag), alarming=due.lag > LATE),
    ]


# --- On the terminal -------------------------------------------------------------------------------------------------

WIDTH = 28


def lines(title: str, figures: list[Figure]) -> Iterator[str]:
    """Yield the lines of a section: its title, and a line for each figure."""
    yield title
    width = width_of(figures)
    yield from (f"  {figure.name:{width}}{figure.value}{mark(figure)}" for figure in figures)


def width_of(figures: list[Figure]) -> int:
    return max(WIDTH, *(len(figure.name) + 2 for figure in figures))


def mark(figure: Figure) -> str:
    return "  !" if figure.alarming else ""


# --- Sections that wings add to idempotency_stats --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """``facts``: for ``--json``, by name. ``lines``: the same for people."""

    facts: Mapping[str, Any]
    lines: Sequence[str]


Source = Callable[[str], Section]
_sources: list[Source] = []


def register(source: Source) -> None:
    """Show the section that ``source`` returns for the alias of a database. Call this in the ``ready()`` of an app."""
    if source not in _sources:  # an AppConfig can get ready again
        _sources.append(source)


def sections(using: str) -> list[Section]:
    return [source(using) for source in _sources]
