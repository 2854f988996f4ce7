"""What operators see of the outbox: dead letters, figures and timelines; and the clean-up of events that were kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Unpack
from uuid import UUID

from django.db import connections, router
from django.db.models import Count, DurationField, ExpressionWrapper, F, Q, QuerySet, Value
from django.utils.translation import gettext_lazy as _

from django_idempotency.conf import conf
from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.models import LANES, TRIED, OutboxEvent, Relay, Status
from django_idempotency.instrumentation.metrics import Gauge, GaugeFamily
from django_idempotency.maintenance.sweep import Bounds, Oldest, Swept, of_oldest, sweep, total
from django_idempotency.maintenance.timeline import Event
from django_idempotency.models import DatabaseNow, IdempotencyRecord
from django_idempotency.values.printable import printable

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
OR_MORE = "; 100,000 means or more"
GAUGES = (
    Gauge("outbox_pending", f"events that are not published yet{OR_MORE}", {"": "pending"}, unit="{event}"),
    Gauge("outbox_failing", f"those of them that were refused at least once{OR_MORE}", {"": "failing"}, unit="{event}"),
    Gauge("outbox_dead", f"dead letters of the outbox{OR_MORE}", {"": "dead"}, unit="{event}"),
    Gauge("outbox_age", "age of the oldest event that is not published yet, 0 without one", {"": "age"}, unit="s"),
    Gauge("outbox_relays", "live relays", {"": "relays"}, unit="{relay}"),
)
MOST_SHOWN = 20


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


# --- For Prometheus and OpenTelemetry --------------------------------------------------------------------------------


def _by_publisher(using: str) -> Mapping[str, Mapping[str, Any]]:
    return {of.publisher: asdict(of) for of in figures(using=using)} if database() == using else {}


FAMILY = GaugeFamily("publisher", GAUGES, _by_publisher)


# --- The timeline of a record ----------------------------------------------------------------------------------------


def outbox_events(record: IdempotencyRecord) -> Iterator[Event]:
    """Yield what happened to at most 20, oldest first. Confirmed ones are gone unless ``RETENTION`` keeps them."""
    events = OutboxEvent.objects.using(_database_of(record)).filter(record_id=record.pk).order_by("id")
    for event in events.defer("payload", "headers")[:MOST_SHOWN]:
        yield Event(event.created_at, _about(_("event {topic} written to the outbox"), event))
        if event.finished_at is not None:
            is_dead = event.status == Status.DEAD
            text = _("event {topic} given up: {error}") if is_dead else _("event {topic} published")
            yield Event(event.finished_at, _about(text, event))
        elif event.attempts and event.available_at is not None:
            yield Event(event.available_at, _about(_("event {topic} is due to be tried again: {error}"), event))


def _database_of(record: IdempotencyRecord) -> str:
    """Return the alias of the record's shard if the outbox is in it; otherwise that of the outbox."""
    shard = record._state.db
    if shard and shard in conf().shards and router.allow_migrate_model(shard, OutboxEvent):
        return shard
    return database()


def _about(sentence: object, event: OutboxEvent) -> str:
    return str(sentence).format(topic=printable(event.topic), error=printable(event.error))
