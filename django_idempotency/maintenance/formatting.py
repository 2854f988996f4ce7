"""Figures as text, for the terminal and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_idempotency.maintenance.stats import MEASURES
from django_idempotency.values.registry import Registry


@dataclass(frozen=True, slots=True)
class Figure:
    """``alarming``: an operator should look at it; in the admin at the records in
    ``situation``, if there is one.
    """

    name: str
    value: str
    alarming: bool = False
    situation: str = ""


def amount(number: float | None, most: float | None = None) -> str:
    """Return ``12,345``, or ``12,345 or more`` if ``number`` is ``most``, at which
    counting stops.
    """
    if number is None:
        return _("unknown")
    shown = number_format(round(number), force_grouping=True)
    return _("%(number)s or more") % {"number": shown} if number == most else shown


def share(part: float) -> str:
    return f"{_two_places(part * 100)} %"


def _two_places(number: float) -> str:
    return number_format(f"{number:.2f}")


def volume(bytes: float | None) -> str:
    return (
        _("unknown")
        if bytes is None
        else filesizeformat(round(bytes)).replace("\xa0", " ")
    )


_UNITS = ((24 * 3600, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return ``0.25 s``, ``42 s`` or ``3 h 7 min``: at most the two largest units."""
    if seconds < 10:
        return f"{_two_places(seconds)} s" if seconds else "0 s"
    rest, parts = round(seconds), list[tuple[int, str]]()
    for unit, name in _UNITS:
        number, rest = divmod(rest, unit)
        if number or parts:
            parts.append((number, name))
    return " ".join(f"{number} {name}" for number, name in parts[:2] if number)


def age(seconds: float) -> str:
    """Return ``3 s``, ``42 s`` or ``3 h 7 min``: like ``duration``, but in whole
    seconds.
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 10 else duration(whole)


_SHOWN: Mapping[str, Callable[[Any], str]] = {"s": duration, "By": volume}


def figures(
    found: Mapping[str, float | None], most: float | None = None
) -> list[Figure]:
    """Return those of ``found`` that have a title, in the order of ``MEASURES``.
    ``most``: as for ``amount``.
    """
    return [
        Figure(
            str(measure.title),
            _shown(name, found, most),
            (found[name] or 0) > measure.alarming_above,
            measure.situation,
        )
        for name, measure in MEASURES.items()
        if measure.title and name in found
    ]


def _shown(name: str, found: Mapping[str, float | None], most: float | None) -> str:
    if (number := found[name]) is None:
        return _("unknown")
    if name == "dead_rows":
        return f"{amount(number)} ({volume(found['dead_bytes'])})"
    show = _SHOWN.get(MEASURES[name].unit)
    return show(number) if show else amount(number, most)


# --- On the terminal ------------------------------------------------------------------


def lines(title: str, figures: list[Figure]) -> Iterator[str]:
    """Yield the lines of a section: its title, and a line for each figure."""
    yield title
    width = max(28, *(len(figure.name) + 2 for figure in figures))
    for figure in figures:
        yield f"  {figure.name:{width}}{figure.value}" + "  !" * figure.alarming


# --- Sections that wings add to idempotency_stats -------------------------------------


# Called with the alias of a database. Return facts for ``--json``, by name, and the
# same as lines.
Section = Callable[[str], tuple[Mapping[str, Any], Sequence[str]]]
sections: Registry[Section] = Registry()
