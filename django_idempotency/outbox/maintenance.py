"""Requeue or discard dead letters, delete published events that were kept, and get figures of the outbox."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db import router, transaction
from django.db.models import Count, DurationField, ExpressionWrapper, Min, Q, QuerySet, Value

from django_idempotency.models import DatabaseNow
from django_idempotency.outbox.conf import options
from django_idempotency.outbox.models import OutboxEvent, Relay, Status
from django_idempotency.signals import outbox_requeued, send_of_outbox

Events = QuerySet[OutboxEvent]

CLEANUP_BATCH = 1000
FAILING = Q(status=Status.PENDING, attempts__gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The outcome of a cleanup. ``rows``: how many events were deleted. ``finished``: no more events are due."""

    rows: int = 0
    finished: bool = True

    def __add__(self, later: Cleaned) -> Cleaned:
        return Cleaned(rows=self.rows + later.rows, finished=later.finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The state of a publisher. ``oldest``: when its oldest pending event was written. ``age``: seconds since then."""

    publisher: str
    pending: int
    failing: int
    dead: int
    oldest: datetime | None
    age: float = 0.0
    relays: int


def database(using: str | None = None) -> str:
    """Return the alias of the outbox's database: ``using``, else the setting's, else the router's choice."""
    return using or options().using or router.db_for_write(OutboxEvent)


def dead_letters(*, topic: str | None = None, using: str | None = None) -> Events:
    """Return the events that were given up, ordered by id."""
    dead = OutboxEvent.objects.using(database(using)).filter(status=Status.DEAD).order_by("id")
    return dead if topic is None else dead.filter(topic=topic)


def requeue(events: Collection[UUID] | None = None, *, topic: str | None = None, using: str | None = None) -> int:
    """Have dead letters tried again, ``max_attempts`` times less one. Return how many there were.

    ``events``: the ids of events, or ``None`` for all. If the routes have changed, the events take the new ones. A
    requeued event still comes before the later ones of its key.
    """
    chosen = _chosen(events, topic, using)
    fresh = {"status": Status.PENDING, "attempts": 1, "finished_at": None, "available_at": None}
    requeued: Counter[str] = Counter()
    for each in list(chosen.values_list("topic", flat=True).order_by("topic").distinct()):
        publisher = options().publisher_of(each)
        requeued[publisher] += chosen.filter(topic=each).update(publisher=publisher, **fresh)
    for publisher, count in requeued.items():
        send = partial(send_of_outbox, outbox_requeued, publisher, count, chosen.db)
        transaction.on_commit(send, using=chosen.db, robust=True)
    return requeued.total()


def discard(events: Collection[UUID], *, using: str | None = None) -> int:
    """Delete dead letters for good. Return how many there were. Later events of their keys go on."""
    return _chosen(events, None, using).delete()[0]


def _chosen(events: Collection[UUID] | None, topic: str | None, using: str | None) -> Events:
    dead = dead_letters(topic=topic, using=using).order_by()
    return dead if events is None else dead.filter(event_id__in=events)


def cleaning(*, max_seconds: float | None = None, using: str | None = None) -> Iterator[Cleaned]:
    """Delete events that were published longer than ``RETENTION`` ago, a batch at a time. Never delete dead letters.

    Yield the outcome of each batch. ``max_seconds``: begin no further batch after that.
    """
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    published = OutboxEvent.objects.using(database(using)).filter(status=Status.PUBLISHED)
    kept_for = timedelta(seconds=options().retention or 0)
    due = published.filter(finished_at__lt=DatabaseNow() - Value(kept_for)).order_by("finished_at")
    while True:
        ids = list(due.values_list("pk", flat=True)[:CLEANUP_BATCH])
        rows = published.filter(pk__in=ids).delete()[0] if ids else 0
        finished = len(ids) < CLEANUP_BATCH
        yield Cleaned(rows=rows, finished=finished)
        if finished or (deadline is not None and time.monotonic() >= deadline):
            return


def cleanup(*, max_seconds: float | None = None, using: str | None = None) -> Cleaned:
    """Run all of ``cleaning``, and return its sum."""
    return sum(cleaning(max_seconds=max_seconds, using=using), Cleaned())


def figures(*, using: str | None = None) -> list[Figures]:
    """Return the state of each publisher that is configured or has events."""
    using = database(using)
    rows = OutboxEvent.objects.using(using).exclude(status=Status.PUBLISHED).values("publisher").order_by()
    counted: dict[str, dict[str, Any]] = {
        row["publisher"]: dict(row)
        for row in rows.annotate(
            pending=Count("pk", filter=Q(status=Status.PENDING)),
            failing=Count("pk", filter=FAILING),
            dead=Count("pk", filter=Q(status=Status.DEAD)),
            oldest=Min("created_at", filter=Q(status=Status.PENDING)),
            age=ExpressionWrapper(DatabaseNow() - Min("created_at", filter=Q(status=Status.PENDING)), DurationField()),
        )
    }
    for row in counted.values():
        row["age"] = row["age"].total_seconds() if row["age"] else 0.0
    nothing = {"pending": 0, "failing": 0, "dead": 0, "oldest": None}
    live = dict(
        live_relays(using=using).values_list("publisher").annotate(count=Count("pk")).values_list("publisher", "count")
    )
    return [
        Figures(**{**nothing, "publisher": alias, **counted.get(alias, {})}, relays=live.get(alias, 0))
        for alias in sorted({*options().publishers, *counted})
    ]


def first_failure(publisher: str, *, using: str | None = None) -> str:
    """Return why the publisher's oldest failing event was last refused; ``""`` if none is failing."""
    events = OutboxEvent.objects.using(database(using)).filter(FAILING, publisher=publisher)
    return events.order_by("id").values_list("error", flat=True).first() or ""


def live_relays(*, using: str | None = None) -> QuerySet[Relay]:
    """Return the relays whose lease has not ended."""
    return Relay.objects.using(database(using)).filter(lease_until__gte=DatabaseNow())
