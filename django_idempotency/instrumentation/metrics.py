"""The metrics there are, as data: what each is called, means, and is told by."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import groupby

from django.apps import apps
from django.db import connections

from django_idempotency.events import EVENTS, OUTBOX_EVENTS, Event
from django_idempotency.logs import cause, log
from django_idempotency.outcomes import Operation
from django_idempotency.stats.queries import at_most, stats
from django_idempotency.stores.connections import databases

PREFIX = "idempotency"
LABELS = ("entry_point", "view")
OUTBOX_LABELS = ("publisher",)


@dataclass(frozen=True, slots=True)
class Counter:
    """Of the events of one name; told apart by ``given`` labels, and by ``reason`` where they have one."""

    name: str
    meaning: str
    given: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.given, "reason") if self.reasons else self.given


@dataclass(frozen=True, slots=True)
class Duration:
    """Of runs, in seconds, told by every signal that carries ``seconds``."""

    name: str
    meaning: str
    buckets: tuple[float, ...]
    unit: str = "s"


@dataclass(frozen=True, slots=True)
class Gauge:
    """``fields`` of ``Stats``, by percentile where there are several. ``unit`` as in the unified code for units."""

    name: str
    meaning: str
    fields: Mapping[str, str]
    unit: str = field(default="{record}", kw_only=True)


def _counters(of: Iterable[Event], given: tuple[str, ...]) -> Iterator[Counter]:
    for name, events in groupby(of, key=lambda event: event.name):
        first, *others = events
        reasons = tuple(str(event.reason) for event in (first, *others) if event.reason)
        yield Counter(name, REJECTED if reasons else first.meaning, given, reasons)


REJECTED = "A request was neither run nor replayed, by reason."
COUNTERS = tuple(_counters(EVENTS, LABELS))
OUTBOX_COUNTERS = tuple(_counters(OUTBOX_EVENTS, OUTBOX_LABELS))
RUN = Duration(
    "run",
    "how long runs took, from the claim until what came of them was written",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
GAUGES = (
    Gauge("pending", "records started or processing; 100,000 means or more", {"": "pending"}),
    Gauge(
        "pending_age",
        "age of these since their claim, by percentile",
        {"50": "pending_p50", "95": "pending_p95", "99": "pending_p99", "100": "pending_oldest"},
        unit="s",
    ),
    Gauge(
        "pending_by_lock", "runs in progress without a record, because their claims are locks", {"": "pending_by_lock"}
    ),
    Gauge(
        "pending_by_lock_age",
        "age of the oldest transaction of these that this role may see, 0 without one",
        {"": "pending_by_lock_oldest"},
        unit="s",
    ),
    Gauge(
        "stuck",
        "records started or processing whose lease ran out, and no owner is at work; 100,000 means or more",
        {"": "stuck"},
    ),
    Gauge(
        "stuck_age",
        "for how long the first of these leases has been over, 0 without one",
        {"": "stuck_oldest"},
        unit="s",
    ),
    Gauge("on_hold", "records that wait for an operator; 100,000 means or more", {"": "on_hold"}),
    Gauge("on_hold_age", "for how long the first of these has waited, 0 without one", {"": "on_hold_oldest"}, unit="s"),
    Gauge("due", "records past their time, to be deleted; 100,000 means or more", {"": "due"}),
    Gauge("cleanup_lag", "for how long the oldest of these has been due", {"": "lag"}, unit="s"),
    Gauge("table_rows", "rows of the table, as the database estimates them", {"": "rows"}),
    Gauge("table_dead_rows", "rows deleted or outdated, and not vacuumed yet", {"": "dead_rows"}),
    Gauge("table_size", "size of the table with its indexes", {"": "bytes"}, unit="By"),
)
TABLE_UP = Gauge(
    "table_up", "1 if the figures of the table could be read, 0 if not and they are left out", {}, unit="{table}"
)

OUTBOX_GAUGES = (
    Gauge("outbox_pending", "events that are not published yet", {"": "pending"}, unit="{event}"),
    Gauge("outbox_failing", "those of them that were refused at least once", {"": "failing"}, unit="{event}"),
    Gauge("outbox_dead", "dead letters of the outbox", {"": "dead"}, unit="{event}"),
    Gauge("outbox_age", "age of the oldest event that is not published yet, 0 without one", {"": "age"}, unit="s"),
    Gauge("outbox_relays", "relays that are at work", {"": "relays"}, unit="{relay}"),
)

UNITS = {"s": "_seconds", "By": "_bytes"}


def in_prometheus(metric: Counter | Duration | Gauge) -> str:
    """The metric's name there: ``idempotency_table_size_bytes``."""
    unit = "_total" if isinstance(metric, Counter) else UNITS.get(metric.unit, "")
    return f"{PREFIX}_{metric.name}{unit}"


def in_opentelemetry(metric: Counter | Duration | Gauge) -> str:
    """The metric's name there: ``idempotency.table_size``, with the unit beside it."""
    return f"{PREFIX}.{metric.name}"


def labels(operation: Operation, event: Event | None = None) -> dict[str, str]:
    """What counts are told apart by: never whose key it was, or which."""
    of_all = {"entry_point": str(operation.entry_point or ""), "view": operation.view}
    return of_all | {"reason": str(event.reason)} if event and event.reason else of_all


# --- The figures of the table ----------------------------------------------------------------------------------------

FRESH = 15.0  # seconds that figures are given again for, however often they are asked for
LONGEST = 2  # seconds that the database may spend on a statement

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one database's records, and those of the publishers whose outbox is there."""

    records: Figures
    publishers: Mapping[str, Figures]


class Table:
    """One database's figures, asked for so seldom, and with such a limit, that no scrape can hurt it."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._reading: Reading | None = None

    def reading(self) -> Reading | None:
        """At most ``FRESH`` seconds old; ``None`` if the database did not give it, or not in time."""
        if not self._lock.acquire(timeout=LONGEST):  # another scrape waits for the database: one is enough
            return None
        try:
            if time.monotonic() - self._read_at >= FRESH:
                self._reading = _read(self.using)
                self._read_at = time.monotonic()
            return self._reading
        finally:
            self._lock.release()


_tables: dict[str, Table] = {}
os.register_at_fork(after_in_child=_tables.clear)


def readings() -> dict[str, Reading | None]:
    """What is known of each database with records, by its alias."""
    return {using: _tables.setdefault(using, Table(using)).reading() for using in databases()}


def figures_by_database() -> dict[str, Figures | None]:
    """The figures of each database with records, by its alias."""
    return {using: reading.records if reading else None for using, reading in readings().items()}


def figures_by_publisher() -> dict[str, Figures]:
    """The figures of the outbox, where there is one and its database gave them."""
    known = [reading.publishers for reading in readings().values() if reading]
    return {publisher: figures for publishers in known for publisher, figures in publishers.items()}


def samples(gauge: Gauge, figures: Figures | None) -> Iterator[tuple[str, float]]:
    """Percentile, or nothing, and value."""
    for percentile, name in gauge.fields.items():
        if (value := (figures or {}).get(name)) is not None:
            yield percentile, value


def _read(using: str) -> Reading | None:
    try:
        connection = connections[using]
        # A scrape may come in a thread whose connections Django does not close.
        closed_after = closing(connection) if connection.connection is None else nullcontext()
        with closed_after, at_most(LONGEST, connection.alias):
            return Reading(asdict(stats(using=connection.alias)), _of_publishers(connection.alias))
    except Exception as error:  # a scrape must show the other metrics all the same
        log(logging.WARNING, "table_down", "idempotency figures of %s could not be read: %s", using, cause(error))
        return None


def _of_publishers(using: str) -> dict[str, Figures]:
    if not apps.is_installed("django_idempotency.outbox"):
        return {}
    from django_idempotency.outbox.maintenance import database, figures

    return {of.publisher: asdict(of) for of in figures(using=using)} if database() == using else {}
