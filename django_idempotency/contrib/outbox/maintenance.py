"""What operators see of the outbox, and what they decide about dead letters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Count, DurationField, ExpressionWrapper, F, Q, QuerySet

from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.models import (
    LANES,
    TRIED,
    OutboxEvent,
    Relay,
    Status,
)
from django_idempotency.contrib.outbox.publishing import database
from django_idempotency.contrib.outbox.signals import outbox_requeued
from django_idempotency.extending import send_several
from django_idempotency.extending.figures import Gauge, GaugeFamily
from django_idempotency.extending.operators import lacks_note, lacks_second, write_entry
from django_idempotency.extending.stores import DatabaseNow
from django_idempotency.maintenance import Refusal

Events = QuerySet[OutboxEvent]

MOST = 100_000  # events to look at; a count that reaches this means "or more"
AT_ONCE = 500  # dead letters that are decided about in a transaction
NEW = Q(status=Status.PENDING, attempts=0)
FAILING = Q(status=Status.PENDING, attempts__gt=0)

# The first of each lane, by index, of those that were never tried and of those that
# have failed.
OLDEST = " ".join(
    [
        (
            "SELECT created_at, statement_timestamp() - created_at FROM"
            f" generate_series(0, {LANES - 1}) AS number"
        ),
        "CROSS JOIN LATERAL (",
        " UNION ALL ".join(
            f"(SELECT created_at FROM {OutboxEvent._meta.db_table} WHERE publisher ="
            f" %(publisher)s AND status = '{Status.PENDING}' AND lane = number AND"
            f" {tried} ORDER BY id LIMIT 1)"
            for tried in ("attempts = 0", "attempts >= 1")
        ),
        ") AS first ORDER BY 1 LIMIT 1",
    ]
)
OR_MORE = "; 100,000 means or more"
GAUGES = (
    Gauge(
        "outbox_pending",
        f"events that are not published yet{OR_MORE}",
        {"": "pending"},
        unit="{event}",
    ),
    Gauge(
        "outbox_failing",
        f"those of them that were refused at least once{OR_MORE}",
        {"": "failing"},
        unit="{event}",
    ),
    Gauge(
        "outbox_dead",
        f"dead letters of the outbox{OR_MORE}",
        {"": "dead"},
        unit="{event}",
    ),
    Gauge(
        "outbox_age",
        "age of the oldest event that is not published yet, 0 without one",
        {"": "age"},
        unit="s",
    ),
    Gauge("outbox_relays", "live relays", {"": "relays"}, unit="{relay}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The state of a publisher. ``oldest``: when its first pending event was written.
    ``age``: seconds since then.
    """

    publisher: str
    pending: int
    failing: int
    dead: int
    oldest: datetime | None
    age: float = 0.0
    relays: int


def dead_letters(
    events: Collection[UUID] | None = None,
    *,
    topic: str | None = None,
    using: str | None = None,
) -> Events:
    """Return the events that were given up, ordered by id: all, or those of these event
    ids, or of this topic.
    """
    dead = (
        OutboxEvent.objects.using(database(using))
        .filter(status=Status.DEAD)
        .order_by("id")
    )
    dead = dead if events is None else dead.filter(event_id__in=events)
    return dead if topic is None else dead.filter(topic=topic)


def figures(*, using: str | None = None) -> list[Figures]:
    """Return the state of each publisher that is configured or has events, by indexes.
    Counts go up to ``MOST``.
    """
    using = database(using)
    events = OutboxEvent.objects.using(using)
    live = Relay.objects.using(using).filter(lease_until__gte=DatabaseNow())
    relays = dict(live.values_list("publisher").annotate(Count("pk")))
    found = {
        *options().publishers,
        *_publishers(events.filter(NEW)),
        *_publishers(events.filter(TRIED)),
    }
    return [
        _figures(each, events.filter(publisher=each), relays.get(each, 0))
        for each in sorted(found)
    ]


def _publishers(events: Events) -> Iterator[str]:
    """Yield the publishers of ``events``, each by one lookup in an index that begins
    with them.
    """
    name: str | None = ""
    while name is not None:
        name = (
            events.filter(publisher__gt=name)
            .order_by("publisher")
            .values_list("publisher", flat=True)
            .first()
        )
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
        found = (
            events.filter(status=Status.PENDING)
            .order_by("id")
            .values_list("created_at", age)
            .first()
        )
    return found or (None, timedelta(0))


def first_failure(publisher: str, *, using: str | None = None) -> str:
    """Return why the publisher's oldest failing event was last refused; ``""`` if none
    is failing.
    """
    events = OutboxEvent.objects.using(database(using)).filter(
        FAILING, publisher=publisher
    )
    return events.order_by("id").values_list("error", flat=True).first() or ""


# --- Decisions about dead letters -----------------------------------------------------


class Act(StrEnum):
    REQUEUE = "requeue"
    DISCARD = "discard"

    @property
    def permission(self) -> str:
        """The permission that a user needs for it."""
        verb = "change" if self is Act.REQUEUE else "delete"
        return f"django_idempotency_outbox.{verb}_outboxevent"


ENTRIES = {Act.REQUEUE: "Requeued.", Act.DISCARD: "Discarded."}


def version(event: OutboxEvent) -> str:
    """Return a text that differs each time that ``event`` is given up."""
    return f"{event.attempts} {event.given_up_at}"


def decide(
    act: Act,
    letters: QuerySet[OutboxEvent],
    *,
    by: Any = None,
    note: str = "",
    seen: Mapping[str, str] | None = None,
) -> tuple[int, Counter[Refusal]]:
    """Do ``act`` to dead letters, some at a time, each time in one transaction with the
    entries in their history.

    Return for how many it was done, and how many were refused, by reason.

    A requeued event takes the route of today, is tried ``max_attempts`` times less one,
    and still comes before the later ones of its key. The later events of the key of a
    discarded one go on.

    ``letters``: from ``dead_letters()``. ``by``: the user who decides, or a name.
    ``note``: why, for the history. ``seen``: by primary key, the ``version()`` of each;
    others are refused. ``DECISIONS`` asks for what it asks for with keys.
    """
    if lacks_note(note):
        return 0, Counter({Refusal.NO_NOTE: letters.count()})
    done, refused = 0, Counter[Refusal]()
    ids = list(letters.order_by("pk").values_list("pk", flat=True))
    for first in range(0, len(ids), AT_ONCE):
        with transaction.atomic(using=letters.db):
            rows = letters.filter(
                pk__in=ids[first : first + AT_ONCE]
            ).select_for_update()
            agreed = list[OutboxEvent]()
            for event in rows.defer("payload", "headers").annotate(now=DatabaseNow()):
                if seen is not None and seen.get(str(event.pk)) != version(event):
                    refused[Refusal.CHANGED] += 1
                elif why := lacks_second(
                    event, f"{act} {version(event)}", act.permission, by=by, note=note
                ):
                    refused[why] += 1
                else:
                    write_entry(event, by, f"{ENTRIES[act]} {note}".strip())
                    agreed.append(event)
            if act is Act.REQUEUE:
                _requeue(agreed, letters.db)
            else:
                OutboxEvent.objects.using(letters.db).filter(
                    pk__in=[event.pk for event in agreed]
                ).delete()
            done += len(agreed)
    return done, refused


def _requeue(events: Sequence[OutboxEvent], using: str) -> None:
    ids: dict[str, list[int]] = defaultdict(list)
    for event in events:
        ids[options().publisher_of(event.topic)].append(event.pk)
    fresh = {
        "status": Status.PENDING,
        "attempts": 1,
        "given_up_at": None,
        "available_at": DatabaseNow(),
    }
    for publisher, of_publisher in ids.items():
        rows = OutboxEvent.objects.using(using).filter(pk__in=of_publisher)
        send = partial(
            send_several,
            outbox_requeued,
            publisher,
            rows.update(publisher=publisher, **fresh),
            using,
        )
        transaction.on_commit(send, using=using, robust=True)


# --- For Prometheus and OpenTelemetry -------------------------------------------------


def _by_publisher(using: str) -> Mapping[str, Mapping[str, Any]]:
    return (
        {of.publisher: asdict(of) for of in figures(using=using)}
        if database() == using
        else {}
    )


FAMILY = GaugeFamily("outbox", "publisher", GAUGES, _by_publisher)
