"""What happened recently, by the counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db.models import F, Max, QuerySet, Sum
from django.db.models.functions import TruncHour
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.contrib.dashboard import observations
from django_idempotency.contrib.dashboard.counters import OLDEST, PERIOD
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.extending import families
from django_idempotency.extending.figures import oldest_pending
from django_idempotency.extending.stores import (
    DatabaseNow,
    Rejection,
    Unprotected,
    ahead,
    in_utc,
    record_database,
)

HOUR, DAY, WEEK = 3600, 24 * 3600, 7 * 24 * 3600  # seconds
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# how often something happened in a span of time, by the name of the figure
Activity = dict[str, float]


def _rejected(reason: Rejection) -> str:
    return f"request_rejected.{reason}"


# The title of each figure, and the events that it counts.
FIGURES: Mapping[str, tuple[str | Promise, tuple[str, ...]]] = {
    "replays": (_("replays"), ("response_replayed",)),
    "conflicts": (
        _("conflicts"),
        (_rejected(Rejection.IN_FLIGHT), _rejected(Rejection.WAIT_TIMEOUT)),
    ),
    "mismatches": (_("mismatches"), (_rejected(Rejection.KEY_REUSED),)),
    "takeovers": (_("takeovers"), ("key_taken_over",)),
    "on_hold": (_("refused while on hold"), (_rejected(Rejection.ON_HOLD),)),
    "forbidden": (_("replays forbidden"), (_rejected(Rejection.FORBIDDEN),)),
    "not_admitted": (_("new keys not admitted"), (_rejected(Rejection.NOT_ADMITTED),)),
    "unprotected": (
        _("run unprotected"),
        tuple(f"request_unprotected.{reason}" for reason in Unprotected),
    ),
    "completed": (_("responses stored"), ("key_completed",)),
    "failed": (_("runs that failed"), ("key_failed",)),
    "released": (_("keys released"), ("key_released",)),
    "lost": (_("claims lost to another request"), ("claim_lost",)),
    "stale_writes": (_("late writes rejected"), ("stale_write_rejected",)),
    "reaped": (_("keys reaped"), ("key_reaped",)),
    "store_errors": (_("store unavailable"), ("store_failed",)),
}


def figures_of(counts: Mapping[str, int]) -> Activity:
    """Return the figures for ``counts`` by the name of the event, which is that of its
    signal.

    ``requests``: requests with a key that got an outcome. ``deduplicated``: the share
    of them, 0 to 1, that got a replay. ``lost``: claims that were lost to a quicker
    rival; they are counted as the duplicates that they are. The others are how often
    the events in ``FIGURES``, and each event of a wing, happened.
    """
    figures = {
        name: sum(counts.get(event, 0) for event in events)
        for name, (_title, events) in FIGURES.items()
    }
    ran = max(0, counts.get("key_claimed", 0) + figures["takeovers"] - figures["lost"])
    requests = (
        ran
        + figures["replays"]
        + sum(counts.get(_rejected(reason), 0) for reason in Rejection)
    )
    of_wings = {
        event.name: counts.get(event.name, 0)
        for family in families
        for event in family.events
    }
    share = figures["replays"] / requests if requests else 0.0
    return {"requests": requests, "deduplicated": share, **figures, **of_wings}


def activity(seconds: float, *, using: str | None = None) -> Activity:
    """Return what happened in the last ``seconds``, with the precision of a counter,
    which is five minutes.

    ``using``: as for ``stats``.
    """
    return figures_of(
        dict(_counters(seconds, using).values_list("event").annotate(Sum("count")))
    )


def views(seconds: float, *, using: str | None = None) -> dict[str, Activity]:
    """Return what happened in the last ``seconds`` at each view, by its name.
    ``using``: as for ``stats``.
    """
    counts: dict[str, dict[str, int]] = {}
    for view, event, count in (
        _counters(seconds, using).values_list("view", "event").annotate(Sum("count"))
    ):
        if event not in (*observations.EVENTS, OLDEST):
            counts.setdefault(view, {})[event] = count
    return {view: figures_of(events) for view, events in counts.items()}


# What a line is drawn of, besides the age of the oldest pending key.
LINES = ("requests", "replays", "conflicts", "failed", "unprotected")


# when each slot begins, and by the name of each figure one value for each slot
History = tuple[list[datetime], dict[str, list[float]]]


def history(seconds: int, *, using: str | None = None) -> History:
    """Return what happened in the last ``seconds``, by the hour, or by five minutes
    within one hour. The first and the last slot are not whole.

    What is pending now was pending since its claim. ``using``: as for ``stats``.
    """
    alias = record_database(using)
    slot = timedelta(seconds=PERIOD if seconds <= HOUR else HOUR)
    begins = F("since") if seconds <= HOUR else TruncHour("since", tzinfo=UTC)
    rows = [
        (in_utc(begin, alias), event, total, most, in_utc(now, alias))
        for begin, event, total, most, now in _counters(seconds, using)
        .annotate(begin=begins)
        .values_list("begin", "event")
        .annotate(Sum("count"), Max("count"), now=Max(DatabaseNow()))
    ]
    if not rows:
        return [], {}
    now = rows[0][-1]
    first = now - (now - EPOCH) % slot - seconds // slot.total_seconds() * slot
    times = [first + number * slot for number in range(1 + (now - first) // slot)]
    counts: list[Counter[str]] = [Counter() for _time in times]
    for begin, event, total, most, _now in rows:
        number = max(0, (begin - first) // slot)
        counts[number][event] += most if event == OLDEST else total
    oldest = oldest_pending(using=using)
    ages = [
        max(each[OLDEST], oldest - max(0.0, (now - time - slot).total_seconds()))
        for each, time in zip(counts, times, strict=True)
    ]
    found = [figures_of(each) for each in counts]
    return times, {name: [each[name] for each in found] for name in LINES} | {
        OLDEST: ages
    }


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was observed in a span of time, with ``OBSERVE``.

    ``keyed``, ``unkeyed``: requests with and without a key. ``refused``: requests whose
    key would be missing, malformed or without a scope. ``unprotected``: requests of
    anonymous callers that would run unprotected. ``duplicates_keyed``: they would have
    got a replay or a 409. ``duplicates_unkeyed``: likely duplicates, which would be
    prevented if their clients sent keys. ``views``: the duplicates of each view, the
    most first.
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


def _counters(seconds: float, using: str | None) -> QuerySet[IdempotencyCounter]:
    return (
        IdempotencyCounter.objects.using(record_database(using))
        .filter(since__gt=ahead(-seconds))
        .order_by()
    )
