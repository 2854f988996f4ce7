"""All metrics, as data: the name, meaning and source of each."""

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
    """Counts the events of one name, by the labels in ``given``, and by ``reason`` if the events have one."""

    name: str
    meaning: str
    given: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.given, "reason") if self.reasons else self.given


@dataclass(frozen=True, slots=True)
class Duration:
    """How long runs took, in seconds. Every signal with ``seconds`` adds a value."""

    name: str
    meaning: str
    buckets: tuple[float, ...]
    unit: str = "s"


@dataclass(frozen=True, slots=True)
class Gauge:
    """``fields`` of ``Stats``, by percentile if there are several. ``unit``: as in the Unified Code for Units."""

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
    """Return the metric's name in Prometheus, such as ``idempotency_table_size_bytes``."""
    unit = "_total" if isinstance(metric, Counter) else UNITS.get(metric.unit, "")
    return f"{PREFIX}_{metric.name}{unit}"


def in_opentelemetry(metric: Counter | Duration | Gauge) -> str:
    """Return the metric's name in OpenTelemetry, such as ``idempotency.table_size``. The unit is separate."""
    return f"{PREFIX}.{metric.name}"


def labels(operation: Operation, event: Event | None = None) -> dict[str, str]:
    """Return the labels of a count. They never contain a key or a scope."""
    of_all = {"entry_point": str(operation.entry_point or ""), "view": operation.view}
    return of_all | {"reason": str(event.reason)} if event and event.reason else of_all


# --- Figures of the table --------------------------------------------------------------------------------------------

FRESH = 15.0  # seconds for which figures are reused, however often they are requested
LONGEST = 2  # seconds that a statement may take

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one database's records, and those of the publishers whose outbox is there."""

    records: Figures
    publishers: Mapping[str, Figures]


class Table:
    """One database's figures. They are queried so rarely, and with such a limit, that scrapes can't harm it."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._reading: Reading | None = None

    def reading(self) -> Reading | None:
        """Return a reading at most ``FRESH`` seconds old; ``None`` if the database did not give one in time."""
        if not self._lock.acquire(timeout=LONGEST):  # another scrape is waiting for the database; one is enough
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
    """Return the reading of each database with records, by its alias; ``None`` if there is none."""
    return {using: _tables.setdefault(using, Table(using)).reading() for using in databases()}


def figures_by_database() -> dict[str, Figures | None]:
    """Return the figures of each database with records, by its alias; ``None`` if they could not be read."""
    return {using: reading.records if reading else None for using, reading in readings().items()}


def figures_by_publisher() -> dict[str, Figures]:
    """Return the figures of the outbox by publisher, if there is an outbox and its figures could be read."""
    known = [reading.publishers for reading in readings().values() if reading]
    return {publisher: figures for publishers in known for publisher, figures in publishers.items()}


def samples(gauge: Gauge, figures: Figures | None) -> Iterator[tuple[str, float]]:
    """Yield pairs of percentile and value. The percentile is ``""`` if there is only one value."""
    for percentile, name in gauge.fields.items():
        if (value := (figures or {}).get(name)) is not None:
            yield percentile, value


def _read(using: str) -> Reading | None:
    try:
        connection = connections[using]
        # A scrape may run in a thread whose connections Django does not close.
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
