"""All metrics, as data: the name, meaning and source of each."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

from django.db import connections

from django_idempotency.maintenance.stats import alarms_of_store, at_most, labelled, outside_stores, stats
from django_idempotency.reporting.events import EVENTS, Event, Family
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.connections import databases
from django_idempotency.values.outcomes import Operation

T = TypeVar("T")
PREFIX = "idempotency"
Figures = Mapping[str, float | None]
LABELS = ("entry_point", "view")


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
RUN = Duration(
    "run",
    "how long runs took, from the claim until the outcome was written",
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
        "records started or processing whose lease ran out, without a live owner; 100,000 means or more",
        {"": "stuck"},
    ),
    Gauge(
        "stuck_age",
        "how long ago the first of these leases ran out, 0 without one",
        {"": "stuck_oldest"},
        unit="s",
    ),
    Gauge("on_hold", "records that wait for an operator; 100,000 means or more", {"": "on_hold"}),
    Gauge("on_hold_age", "how long the first of these has waited, 0 without one", {"": "on_hold_oldest"}, unit="s"),
    Gauge("due", "expired records that are due for deletion; 100,000 means or more", {"": "due"}),
    Gauge("cleanup_lag", "how long the oldest of these has been due", {"": "lag"}, unit="s"),
    Gauge("table_rows", "rows of the table, as the database estimates them", {"": "rows"}),
    Gauge("table_dead_rows", "rows deleted or outdated, and not vacuumed yet", {"": "dead_rows"}),
    Gauge("table_size", "size of the table with its indexes", {"": "bytes"}, unit="By"),
)
TABLE_UP = Gauge(
    "table_up",
    "1 if the figures of the table could be read, 0 if not and they are left out",
    {"": "up"},
    unit="{table}",
)


@dataclass(frozen=True, slots=True, eq=False)
class GaugeFamily:
    """Figures of records or of a wing. ``read`` gets a database's alias, and returns them by the value of ``label``."""

    label: str
    gauges: tuple[Gauge, ...]
    read: Callable[[str], Mapping[str, Figures]]


def _of_records(using: str) -> Mapping[str, Figures]:
    return {using: asdict(stats(using=using)) | UP}


UP, DOWN = {"up": 1}, {"up": 0}
RECORDS = GaugeFamily("database", (*GAUGES, TABLE_UP), _of_records)
_families = [RECORDS]


def register(family: GaugeFamily) -> None:
    """Have every adapter report ``family``. Call this in the ``ready()`` of an app."""
    if family not in _families:  # an AppConfig can get ready again
        _families.append(family)


def gauge_families() -> list[GaugeFamily]:
    return list(_families)


def counters_of(family: Family) -> tuple[Counter, ...]:
    return tuple(_counters(family.events, (family.label,)))


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

# What could be read of each family, by the value of its label.
Reading = dict[GaugeFamily, Mapping[str, Figures]]


class Table:
    """The figures of one database or store. They are read so rarely, and with such a limit, that scrapes can't harm it.

    ``read``: returns a reading, or raises.
    """

    def __init__(self, name: str, read: Callable[[], Reading]) -> None:
        self.name = name
        self._read = read
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._reading: Reading = {}

    def reading(self) -> Reading:
        """Return a reading at most ``FRESH`` seconds old; an empty one if there was none in time."""
        if not self._lock.acquire(timeout=LONGEST):  # another scrape is waiting already; one is enough
            return {}
        try:
            if time.monotonic() - self._read_at >= FRESH:
                self._reading = _unless_down(self.name, self._read) or {}
                self._read_at = time.monotonic()
            return self._reading
        finally:
            self._lock.release()


def _unless_down(name: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Exception as error:  # a scrape must show the other metrics all the same
        log(logging.WARNING, "table_down", "idempotency figures of %s could not be read: %s", name, cause(error))
        return None


_tables: dict[str, Table] = {}
os.register_at_fork(after_in_child=_tables.clear)


def figures() -> Reading:
    """Return the figures of every database with records and of every store outside."""
    reads = {using: partial(_read, using) for using in databases()}
    reads |= {labelled(alias): partial(_read_store, alias) for alias in outside_stores()}
    found: dict[GaugeFamily, dict[str, Figures]] = {family: {} for family in _families}
    for name, read in reads.items():
        reading = _tables.setdefault(name, Table(name, read)).reading()
        for family, of_family in ({RECORDS: {name: DOWN}} | reading).items():
            found[family].update(of_family)
    return {**found}


def samples(gauge: Gauge, family: GaugeFamily, reading: Reading) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each sample of ``gauge``."""
    for value, of_value in reading[family].items():
        for percentile, name in gauge.fields.items():
            if (number := of_value.get(name)) is not None:
                yield {family.label: value} | ({"percentile": percentile} if percentile else {}), number


def _read(using: str) -> Reading:
    """Read each family for itself, so that a table that is too large hides no figures but its own."""
    connection = connections[using]
    # A scrape may run in a thread whose connections Django does not close.
    with closing(connection) if connection.connection is None else nullcontext():
        connection.ensure_connection()
        read = {
            family: _unless_down(f"{using} by {family.label}", partial(_in_time, using, family.read))
            for family in _families
        }
    return {family: of_family for family, of_family in read.items() if of_family is not None}


def _in_time(using: str, read: Callable[[str], T]) -> T:
    with at_most(LONGEST, using):
        return read(using)


def _read_store(alias: str) -> Reading:
    return {RECORDS: {labelled(alias): asdict(alarms_of_store(alias, seconds=LONGEST)) | UP}}
