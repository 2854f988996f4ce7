"""What happened recently, by the counters, and the size of the table that it leads to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import DurationField, ExpressionWrapper, F, QuerySet, Sum

from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard import observations
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.models import DatabaseNow
from django_idempotency.reporting.events import families
from django_idempotency.stats.queries import DAY, HOUR, Size
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import Rejection

Activity = dict[str, float]  # how often something happened in a span of time, by the name of the figure


def _rejected(reason: Rejection) -> str:
    return f"request_rejected.{reason}"


# The events that a figure counts.
EVENTS: Mapping[str, tuple[str, ...]] = {
    "replays": ("response_replayed",),
    "conflicts": (_rejected(Rejection.IN_FLIGHT), _rejected(Rejection.WAIT_TIMEOUT)),
    "mismatches": (_rejected(Rejection.KEY_REUSED),),
    "takeovers": ("key_taken_over",),
    "on_hold": (_rejected(Rejection.ON_HOLD),),
    "too_old": (_rejected(Rejection.TOO_OLD),),
    "forbidden": (_rejected(Rejection.FORBIDDEN),),
    "not_admitted": (_rejected(Rejection.NOT_ADMITTED),),
    "completed": ("key_completed",),
    "failed": ("key_failed",),
    "released": ("key_released",),
    "lost": ("claim_lost",),
    "stale_writes": ("stale_write_rejected",),
    "reaped": ("key_reaped",),
    "store_errors": ("store_failed",),
}


def figures_of(counts: Mapping[str, int]) -> Activity:
    """Return the figures for ``counts`` by the name of the event, which is that of its signal.

    ``requests``: requests with a key that got an outcome. ``deduplicated``: the share of them, 0 to 1, that got a
    replay. ``lost``: claims that were lost to a quicker rival; they are counted as the duplicates that they are. The
    others are how often the events in ``EVENTS``, and each event of a wing, happened.
    """
    figures = {name: sum(counts.get(event, 0) for event in events) for name, events in EVENTS.items()}
    ran = max(0, counts.get("key_claimed", 0) + figures["takeovers"] - figures["lost"])
    replays = figures["replays"]
    requests = ran + replays + sum(counts.get(_rejected(reason), 0) for reason in Rejection)
    of_wings = {event.name: counts.get(event.name, 0) for family in families() for event in family.events}
    share = replays / requests if requests else 0.0
    return {"requests": requests, "replays": replays, "deduplicated": share, **figures, **of_wings}


def activity(seconds: float, *, using: str | None = None) -> Activity:
    """Return what happened in the last ``seconds``, with the precision of a counter, which is five minutes.

    ``using``: as for ``stats``.
    """
    return figures_of(dict(_counters(seconds, using).values_list("event").annotate(Sum("count"))))


def views(seconds: float, *, using: str | None = None) -> dict[str, Activity]:
    """Return what happened in the last ``seconds`` at each view, by its name. ``using``: as for ``stats``."""
    counts: dict[str, dict[str, int]] = {}
    for view, event, count in _counters(seconds, using).values_list("view", "event").annotate(Sum("count")):
        if event not in observations.EVENTS:
            counts.setdefault(view, {})[event] = count
    return {view: figures_of(events) for view, events in counts.items()}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was observed in a span of time, with ``OBSERVE``.

    ``keyed``, ``unkeyed``: requests with and without a key. ``refused``: requests whose key would be missing, malformed
    or without a scope. ``unprotected``: requests of anonymous callers that would run unprotected.
    ``duplicates_keyed``: they would have got a replay or a 409. ``duplicates_unkeyed``: likely duplicates, which would
    be prevented if their clients sent keys. ``views``: the duplicates of each view, the most first.
    """

    keyed: int
    unkeyed: int
    refused: int
    unprotected: int
    duplicates_keyed: int
    duplicates_unkeyed: int
    views: dict[str, int]

    @property
    def preventable(self) -> int:
        return self.duplicates_keyed + self.duplicates_unkeyed


def observed(seconds: float, *, using: str | None = None) -> Observed:
    """Return what was observed in the last ``seconds``. ``using``: as for ``stats``."""
    total: Counter[str] = Counter()
    views: Counter[str] = Counter()
    found = _counters(seconds, using).filter(event__in=observations.EVENTS)
    for event, view, count in found.values_list("event", "view").annotate(Sum("count")):
        total[event] += count
        if event in (observations.DUPLICATE_KEYED, observations.DUPLICATE_UNKEYED):
            views[view] += count
    return Observed(
        keyed=total[observations.KEYED],
        unkeyed=total[observations.UNKEYED],
        refused=total[observations.REFUSED],
        unprotected=total[observations.UNPROTECTED],
        duplicates_keyed=total[observations.DUPLICATE_KEYED],
        duplicates_unkeyed=total[observations.DUPLICATE_UNKEYED],
        views=dict(views.most_common()),
    )


def busiest(views: Mapping[str, Activity], name: str, *, most: int = 10) -> list[tuple[str, Activity]]:
    """Return the views with the highest ``name``, such as ``"replays"``, leaving out those with none. Pure."""
    found = [(view, of_view) for view, of_view in views.items() if of_view[name]]
    return sorted(found, key=lambda each: (-each[1][name], each[0]))[:most]


def _counters(seconds: float, using: str | None) -> QuerySet[IdempotencyCounter]:
    return IdempotencyCounter.objects.using(record_database(using)).filter(since__gt=ahead(-seconds)).order_by()


# --- Projection ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The size that the table will reach if activity stays as on the last day; ``None`` while that is not known.

    ``rows_per_day``: responses stored. ``expected_rows``: the rows that this gives within the project's retention.
    ``expected_bytes``: their size, at the present size of a row.
    """

    rows_per_day: float | None = None
    expected_rows: float | None = None
    expected_bytes: float | None = None


def projection(size: Size, *, using: str | None = None) -> Projection:
    """Project ``size`` by the counters of the last day, or of less if they began later. ``using``: as for ``stats``."""
    begun = IdempotencyCounter.objects.using(record_database(using)).order_by("since")
    age = ExpressionWrapper(DatabaseNow() - F("since"), output_field=DurationField())
    oldest: timedelta | None = begun.values_list(age, flat=True).first()
    seconds = min(oldest.total_seconds(), DAY) if oldest else 0.0
    return project(size, activity(DAY, using=using)["completed"], seconds=seconds, kept_for=conf().policy.kept_for)


def project(size: Size, completed: float, *, seconds: float, kept_for: float) -> Projection:
    """Project ``size`` by ``completed`` responses stored in ``seconds``; empty for less than an hour. Pure."""
    if seconds < HOUR:
        return Projection()
    per_second = completed / seconds
    rows = per_second * kept_for
    per_row = size.bytes / size.rows if size.rows and size.bytes else None
    return Projection(
        rows_per_day=per_second * DAY,
        expected_rows=rows,
        expected_bytes=None if per_row is None else rows * per_row,
    )
