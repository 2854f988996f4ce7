"""All metrics, as data: the name, meaning and source of each."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from django.db import connections

from django_idempotency.maintenance.stats import (
    MEASURES,
    alarms_of_store,
    at_most,
    labelled,
    outside_stores,
    stats,
)
from django_idempotency.reporting.events import EVENTS, Event, Family, families
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.connections import databases
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.registry import Registry

T = TypeVar("T")
PREFIX = "idempotency"
Figures = Mapping[str, float | None]
LABELS = ("entry_point", "view")


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts the events of one name."""

    name: str
    meaning: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duration:
    """How long runs took, in seconds. Every signal with ``seconds`` adds a value."""

    name: str
    meaning: str
    buckets: tuple[float, ...]
    unit: str = "s"


@dataclass(frozen=True, slots=True)
class Gauge:
    """``fields``: names of figures, by the value of the label ``by`` if there are
    several; if there are none, each figure has its own name. ``unit``: as in the
    Unified Code for Units.
    """

    name: str
    meaning: str
    fields: Mapping[str, str]
    unit: str = field(default="{record}", kw_only=True)
    by: str = field(default="percentile", kw_only=True)


def events_of(family: Family | None) -> tuple[Event, ...]:
    """Return a wing's events, or the core's."""
    return EVENTS if family is None else family.events


def counters_of(family: Family | None) -> Iterator[Counter]:
    given = LABELS if family is None else (family.label,)
    for name, events in groupby(events_of(family), key=lambda event: event.name):
        first = next(events)
        meaning = BY_REASON.get(name, first.meaning)
        yield Counter(name, meaning, (*given, *first.labels))


BY_REASON = {
    "request_rejected": "A request was neither run nor replayed, by reason.",
    "request_unprotected": "A request ran unprotected despite its key, by reason.",
}
RUN = Duration(
    "run",
    "how long runs took, from the claim until the outcome was written",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)


def _gauges() -> Iterator[Gauge]:
    for metric, names in groupby(MEASURES, key=lambda name: MEASURES[name].metric):
        fields = {MEASURES[name].percentile: name for name in names}
        measure = MEASURES[next(iter(fields.values()))]
        if metric:
            yield Gauge(metric, measure.meaning, fields, unit=measure.unit)


GAUGES = tuple(_gauges())
TABLE_UP = Gauge(
    "table_up",
    "1 if these figures could be read, 0 if not and they are left out",
    {},
    unit="{table}",
    by="figures",
)


@dataclass(frozen=True, slots=True, eq=False)
class GaugeFamily:
    """Figures of records or of a wing. ``read`` gets a database's alias, and returns
    them by the value of ``label``, or by those of several. ``name``: what the figures
    are of, in ``table_up``.
    """

    name: str
    label: str | tuple[str, ...]
    gauges: tuple[Gauge, ...]
    read: Callable[[str], Mapping[Any, Figures]]

    def labels(self, value: Any) -> dict[str, str]:
        if isinstance(self.label, str):
            return {self.label: value}
        return dict(zip(self.label, value, strict=True))


RECORDS = GaugeFamily(
    "records", "database", GAUGES, lambda using: {using: stats(using=using)}
)
UP = GaugeFamily("", "database", (TABLE_UP,), lambda _using: {})
gauge_families = Registry(UP, RECORDS)


UNITS = {"s": "_seconds", "By": "_bytes"}


def in_prometheus(metric: Counter | Duration | Gauge) -> str:
    """Return the metric's name in Prometheus, such as
    ``idempotency_table_size_bytes``.
    """
    unit = "_total" if isinstance(metric, Counter) else UNITS.get(metric.unit, "")
    return f"{PREFIX}_{metric.name}{unit}"


def in_opentelemetry(metric: Counter | Duration | Gauge) -> str:
    """Return the metric's name in OpenTelemetry, such as ``idempotency.table_size``.
    The unit is separate.
    """
    return f"{PREFIX}.{metric.name}"


def labels(
    family: Family | None, sender: Any, operation: Operation | None = None
) -> dict[str, str]:
    """Return the labels of an event's count, without its reason. They never contain a
    key or a scope.
    """
    if operation is None:
        return {} if family is None else {family.label: sender}
    return {"entry_point": str(operation.entry_point or ""), "view": operation.view}


class Instruments(ABC):
    """Counts every event and times runs, with the instruments of one monitoring
    system.
    """

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        self._count_family(None)
        families.for_each(self._count_family)

    def _count_family(self, family: Family | None) -> None:
        self.counters |= {
            counter.name: self.make(counter) for counter in counters_of(family)
        }

    @abstractmethod
    def make(self, counter: Counter) -> Any: ...

    @abstractmethod
    def count(
        self, event: Event, family: Family | None, given: dict[str, str], count: int
    ) -> None:
        """``given``: the labels, but for the reason."""

    @abstractmethod
    def time(self, seconds: float, given: dict[str, str]) -> None: ...

    def receive(
        self,
        event: Event,
        family: Family | None,
        *,
        sender: Any,
        count: int = 1,
        **named: Any,
    ) -> None:
        given = labels(family, sender, named.get("operation"))
        self.count(event, family, given, count)
        if "seconds" in named:
            self.time(named["seconds"], given)


# --- Figures of the table -------------------------------------------------------------

FRESH = 15.0  # seconds for which figures are reused, however often they are requested
LONGEST = 2  # seconds that a statement may take

# What could be read of each family, by the value of its label.
Reading = dict[GaugeFamily, Mapping[Any, Figures]]


class Table:
    """The figures of one database or store. They are read so rarely, and with such a
    limit, that scrapes can't harm it.

    ``read``: returns a reading, or raises.
    """

    def __init__(self, name: str, read: Callable[[], Reading]) -> None:
        self.name = name
        self._read = read
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._reading: Reading = {}

    def reading(self) -> Reading:
        """Return a reading at most ``FRESH`` seconds old; an empty one if there was
        none in time.
        """
        # another scrape is waiting already; one is enough
        if not self._lock.acquire(timeout=LONGEST):
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
        log(
            logging.WARNING,
            "table_down",
            "idempotency figures of %s could not be read: %s",
            name,
            cause(error),
        )
        return None


_tables: dict[str, Table] = {}
os.register_at_fork(after_in_child=_tables.clear)


def figures() -> Reading:
    """Return the figures of every database with records and of every store outside."""
    of_database = tuple(family for family in gauge_families if family is not UP)
    reads: dict[str, tuple[Callable[[], Reading], tuple[GaugeFamily, ...]]] = {
        using: (partial(_read, using), of_database) for using in databases()
    }
    reads |= {
        labelled(alias): (partial(_read_store, alias), (RECORDS,))
        for alias in outside_stores()
    }
    found: dict[GaugeFamily, dict[Any, Figures]] = {
        family: {} for family in gauge_families
    }
    for name, (read, wanted) in reads.items():
        reading = _tables.setdefault(name, Table(name, read)).reading()
        for family, of_family in reading.items():
            found[family].update(of_family)
        found[UP][name] = {family.name: int(family in reading) for family in wanted}
    return {**found}


def samples(
    gauge: Gauge, family: GaugeFamily, reading: Reading
) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each sample of ``gauge``."""
    for value, of_value in reading[family].items():
        for of_label, name in (
            gauge.fields or {name: name for name in of_value}
        ).items():
            if (number := of_value.get(name)) is not None:
                yield (
                    family.labels(value) | ({gauge.by: of_label} if of_label else {}),
                    number,
                )


def _read(using: str) -> Reading:
    """Read each family for itself, so that a table that is too large hides no figures
    but its own.
    """
    connection = connections[using]
    # A scrape may run in a thread whose connections Django does not close.
    with closing(connection) if connection.connection is None else nullcontext():
        connection.ensure_connection()
        read = {
            family: _unless_down(
                f"{family.name} in {using}", partial(_in_time, using, family.read)
            )
            for family in gauge_families
            if family is not UP
        }
    return {
        family: of_family for family, of_family in read.items() if of_family is not None
    }


def _in_time(using: str, read: Callable[[str], T]) -> T:
    with at_most(LONGEST, using):
        return read(using)


def _read_store(alias: str) -> Reading:
    return {RECORDS: {labelled(alias): alarms_of_store(alias, seconds=LONGEST)}}
