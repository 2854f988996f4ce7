"""Find dead letters, delete published events that were kept, and get figures of the outbox."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Unpack
from uuid import UUID

from django.db import connections, router
from django.db.models import Count, DurationField, ExpressionWrapper, F, Q, QuerySet, Value

from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.models import LANES, TRIED, OutboxEvent, Relay, Status
from django_idempotency.maintenance.sweep import Bounds, Oldest, Swept, of_oldest, sweep, total
from django_idempotency.models import DatabaseNow

Events = QuerySet[OutboxEvent]

CLEANUP_BATCH = 1000
MOST = 100_000  # events to look at; a count that reaches this means "or more"
NEW = Q(status=Status.PENDING, attempts=0)
FAILING = Q(status=Status.PENDING, attempts__gt=0)

# The first of each lane, by index, of those that were never tried and of those that have failed.
OLDEST = " ".join(
    [
        f"SELECT created_at, statement_timestamp() - created_at FROM generate_series(0, {LANES - 1}) AS number",
        "CROSS JOIN LATERAL (",
        " UNION ALL ".join(
            f"(SELECT created_at FROM {OutboxEvent._meta.db_table} WHERE publisher = %(publisher)s"
            f" AND status = '{Status.PENDING}' AND lane = number AND {tried} ORDER BY id LIMIT 1)"
            for tried in ("attempts = 0", "attempts >= 1")
        ),
        ") AS first ORDER BY 1 LIMIT 1",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The state of a publisher. ``oldest``: when its first pending event was written. ``age``: seconds since then."""

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


def dead_letters(
    events: Collection[UUID] | None = None, *, topic: str | None = None, using: str | None = None
) -> Events:
    """Return the events that were given up, ordered by id: all, or those of these event ids, or of this topic."""
    dead = OutboxEvent.objects.using(database(using)).filter(status=Status.DEAD).order_by("id")
    dead = dead if events is None else dead.filter(event_id__in=events)
    return dead if topic is None else dead.filter(topic=topic)


def cleaning(**bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Delete events that were published longer than ``RETENTION`` ago, a batch at a time. Never delete dead letters.

    Yield the result of each batch. The arguments are those of ``Bounds``; the default of ``batch`` is 1,000.
    """
    using = database(bounds.get("using"))
    published = OutboxEvent.objects.using(using).filter(status=Status.PUBLISHED)
    kept_for = timedelta(seconds=options().retention or 0)
    due = published.filter(finished_at__lt=DatabaseNow() - Value(kept_for))
    delete = of_oldest("finished_at", lambda events: events.delete())
    for one, swept in sweep(Oldest(lambda: due, "finished_at"), delete, bounds, batch=CLEANUP_BATCH, pause=0):
        yield replace(swept, done={"deleted": len(one.changed)})


def cleanup(**bounds: Unpack[Bounds]) -> Swept:
    """Run all of ``cleaning``, and return its sum."""
    return total(cleaning(**bounds))


def figures(*, using: str | None = None) -> list[Figures]:
    """Return the state of each publisher that is configured or has events, by indexes. Counts go up to ``MOST``."""
    using = database(using)
    events = OutboxEvent.objects.using(using)
    of_publisher = live_relays(using=using).values_list("publisher")
    relays = dict(of_publisher.annotate(count=Count("pk")).values_list("publisher", "count"))
    found = {*options().publishers, *_publishers(events.filter(NEW)), *_publishers(events.filter(TRIED))}
    return [_figures(each, events.filter(publisher=each), relays.get(each, 0)) for each in sorted(found)]


def _publishers(events: Events) -> Iterator[str]:
    """Yield the publishers of ``events``, each by one lookup in an index that begins with them."""
    name: str | None = ""
    while name is not None:
        name = events.filter(publisher__gt=name).order_by("publisher").values_list("publisher", flat=True).first()
        if name is not None:
            yield name


def _figures(publisher: str, events: Events, relays: int) -> Figures:
    failing = events.filter(FAILING)[:MOST].count()
    oldest, age = _oldest(publisher, events)
    return Figures(
        publisher=publisher,
        pending=min(MOST, events.filter(NEW)[:MOST].count() + failing),
        failing=failing,
        dead=events.filter(TRIED, status=Status.DEAD)[:MOST].count(),
        oldest=oldest,
        age=age.total_seconds(),
        relays=relays,
    )


def _oldest(publisher: str, events: Events) -> tuple[datetime | None, timedelta]:
    """Return when the first pending event was written, and how long ago."""
    connection = connections[events.db]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(OLDEST, {"publisher": publisher})
            found = cursor.fetchone()
    else:
        age = ExpressionWrapper(DatabaseNow() - F("created_at"), DurationField())
        found = events.filter(status=Status.PENDING).order_by("id").values_list("created_at", age).first()
    return found or (None, timedelta(0))


def first_failure(publisher: str, *, using: str | None = None) -> str:
    """Return why the publisher's oldest failing event was last refused; ``""`` if none is failing."""
    events = OutboxEvent.objects.using(database(using)).filter(FAILING, publisher=publisher)
    return events.order_by("id").values_list("error", flat=True).first() or ""


def live_relays(*, using: str | None = None) -> QuerySet[Relay]:
    """Return the relays whose lease has not ended."""
    return Relay.objects.using(database(using)).filter(lease_until__gte=DatabaseNow())
