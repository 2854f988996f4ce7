"""Figures as text, for the terminal and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.stats.queries import Activity, Due, Observed, Pending, Projection, Size
from django_idempotency.stats.sessions import ByLock

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
    """Return ``part`` as a percentage, such as ``0.42 %``."""
    return f"{_two_places(part * 100)} %"


def _two_places(number: float) -> str:
    return number_format(f"{number:.2f}")


def volume(bytes: float | None) -> str:
    """Return a size such as ``1.2 GB``."""
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


def sizes(size: Size, projection: Projection) -> list[Figure]:
    """Return how large the table is, and how large it will be."""
    dead = f"{amount(size.dead_rows)} ({volume(size.dead_bytes)})"
    expected = f"{amount(projection.expected_rows)} ({volume(projection.expected_bytes)})"
    return [
        Figure(_("rows"), amount(size.rows)),
        Figure(_("size"), volume(size.bytes)),
        Figure(_("of which table"), volume(size.table_bytes)),
        Figure(_("of which indexes"), volume(size.index_bytes)),
        Figure(_("dead rows"), _("unknown") if size.dead_rows is None else dead),
        Figure(_("responses stored a day"), amount(projection.rows_per_day)),
        Figure(_("rows at this rate"), _("unknown") if projection.expected_rows is None else expected),
    ]


def waiting(pending: Pending, most: float) -> list[Figure]:
    """Return how many keys are not finished, and how old they are."""
    return [
        Figure(_("pending"), amount(pending.pending, most)),
        Figure(_("age, p50"), duration(pending.pending_p50)),
        Figure(_("age, p95"), duration(pending.pending_p95)),
        Figure(_("age, p99"), duration(pending.pending_p99)),
        Figure(_("oldest"), duration(pending.pending_oldest)),
        *_by_lock(pending),
        Figure(_("lease ran out"), amount(pending.stuck, most), alarming=bool(pending.stuck), situation="stuck"),
        Figure(
            _("on hold for an operator"),
            amount(pending.on_hold, most),
            alarming=bool(pending.on_hold),
            situation="on_hold",
        ),
    ]


def _by_lock(found: ByLock) -> list[Figure]:
    """Return no figures if the database can't tell."""
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


NAMES: Mapping[str, str | Promise] = {
    "requests": gettext_lazy("requests with a key"),
    "deduplicated": gettext_lazy("deduplicated"),
    "replays": gettext_lazy("replays"),
    "conflicts": gettext_lazy("conflicts"),
    "mismatches": gettext_lazy("mismatches"),
    "takeovers": gettext_lazy("takeovers"),
    "on_hold": gettext_lazy("told that an operator decides"),
    "too_old": gettext_lazy("refused as too late"),
    "forbidden": gettext_lazy("replays forbidden"),
    "not_admitted": gettext_lazy("new keys not admitted"),
    "completed": gettext_lazy("responses stored"),
    "failed": gettext_lazy("runs that failed"),
    "released": gettext_lazy("keys released"),
    "lost": gettext_lazy("claims lost to a rival"),
    "stale_writes": gettext_lazy("late writes rejected"),
    "reaped": gettext_lazy("keys reaped"),
    "store_errors": gettext_lazy("store not reached"),
}
OUTBOX_NAMES: Mapping[str, str | Promise] = {
    "outbox_published": gettext_lazy("events published"),
    "outbox_failed": gettext_lazy("refusals, to be tried again"),
    "outbox_dead_lettered": gettext_lazy("dead letters"),
    "outbox_requeued": gettext_lazy("dead letters requeued"),
}
_ALARMING = frozenset({"on_hold", "stale_writes", "store_errors", "outbox_dead_lettered"})


def happened(activity: Activity, names: Mapping[str, str | Promise] = NAMES) -> list[Figure]:
    """Return what happened in a span of time: to keys, unless ``names`` selects other fields."""
    return [_happened(name, str(names[name]), getattr(activity, name)) for name in names]


def _happened(field: str, name: str, value: Any) -> Figure:
    shown: Callable[[Any], str] = share if field == "deduplicated" else amount
    return Figure(name, shown(value), alarming=bool(value) and field in _ALARMING)


MOST_NAMED = 5


def observed(observed: Observed) -> list[Figure]:
    """Return what was observed in a week and would have been prevented; the views and clients that matter most."""
    views = [
        Figure(_("at %(view)s") % {"view": view}, amount(count))
        for view, count in list(observed.views.items())[:MOST_NAMED]
    ]
    clients = [
        Figure(_("without a key, %(client)s") % {"client": name}, amount(unkeyed))
        for name, (_keyed, unkeyed) in list(observed.clients.items())[:MOST_NAMED]
        if unkeyed
    ]
    return [
        Figure(_("would have been prevented"), amount(observed.preventable)),
        Figure(_("of which with a key"), amount(observed.duplicates_keyed)),
        Figure(_("of which without, and likely"), amount(observed.duplicates_unkeyed)),
        *views,
        Figure(_("requests with a key"), amount(observed.keyed)),
        Figure(_("requests without a key"), amount(observed.unkeyed)),
        *clients,
    ]
