"""The metrics there are, as data: what each is called, means, and is told by."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from django.db import connections
from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.logs import cause, log
from django_idempotency.maintenance import database
from django_idempotency.outcomes import Operation
from django_idempotency.stats import at_most, stats

PREFIX = "idempotency"
LABELS = ("door", "view")


@dataclass(frozen=True, slots=True)
class Counter:
    """``of_claim``: it says what a caller's claim came to."""

    name: str
    meaning: str
    signals: tuple[Signal, ...]
    of_claim: bool = False


@dataclass(frozen=True, slots=True)
class Duration:
    """Of runs, in seconds, told by every signal that carries ``seconds``."""

    name: str
    meaning: str
    buckets: tuple[float, ...]
    unit: str = "s"


@dataclass(frozen=True, slots=True)
class Gauge:
    """``fields`` of ``Stats``, by quantile where there are several. ``unit`` as in the unified code for units."""

    name: str
    meaning: str
    fields: Mapping[str, str]
    unit: str = field(default="{record}", kw_only=True)


COUNTERS = (
    Counter("miss", "a key had no answer yet: it was claimed, and runs", (signals.claimed, signals.taken_over), True),
    Counter("hit", "a stored answer was given again", (signals.replayed,), True),
    Counter("conflict", "a duplicate was told to ask again", (signals.in_flight,), True),
    Counter(
        "pending_timeout", "a duplicate waited in vain, and was told to ask again", (signals.pending_timeout,), True
    ),
    Counter("mismatch", "a key came with another request", (signals.mismatched,), True),
    Counter("takeover", "a dead holder's key was claimed; a miss, too", (signals.taken_over,), True),
    Counter("held", "a caller was told that a person has to decide", (signals.held,), True),
    Counter("refused_late", "a request came later than anything is known of its key", (signals.refused_late,), True),
    Counter("lost_claim", "a rival was quicker between claim and row lock: nothing was run", (signals.claim_lost,)),
    Counter(
        "stale_write_rejected",
        "a holder came back too late: the fencing token kept it from writing",
        (signals.stale_write_rejected,),
    ),
    Counter("store_error", "the store failed, at the claim or at the completion", (signals.store_failed,)),
    Counter("completed", "an answer was stored", (signals.completed,)),
    Counter("failed", "a run failed; a retry may run again", (signals.failed,)),
    Counter("released", "a run left its key as if never used", (signals.released,)),
    Counter("reaped", "maintenance freed a key whose lease had run out, or set it aside", (signals.reaped,)),
)
RUN = Duration(
    "run",
    "how long runs took, from the claim until what came of them was written",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
GAUGES = (
    Gauge("pending", "records started or processing; 100,000 means or more", {"": "pending"}),
    Gauge(
        "pending_age",
        "age of these since their claim, by quantile",
        {"0.5": "pending_p50", "0.95": "pending_p95", "0.99": "pending_p99", "1": "pending_oldest"},
        unit="s",
    ),
    Gauge("stuck", "those of them whose lease ran out; 100,000 means or more", {"": "stuck"}),
    Gauge("due", "records past their time, to be deleted; 100,000 means or more", {"": "due"}),
    Gauge("cleanup_lag", "for how long the oldest of these has been due", {"": "lag"}, unit="s"),
    Gauge("table_rows", "rows of the table, as the database estimates them", {"": "rows"}),
    Gauge("table_dead_rows", "rows deleted or outdated, and not vacuumed yet", {"": "dead_rows"}),
    Gauge("table_size", "size of the table with its indexes", {"": "bytes"}, unit="By"),
)
TABLE_UP = Gauge(
    "table_up", "1 if the figures of the table could be read, 0 if not and they are left out", {}, unit="{table}"
)

UNITS = {"s": "_seconds", "By": "_bytes"}


def in_prometheus(metric: Counter | Duration | Gauge) -> str:
    """The metric's name there: ``idempotency_table_size_bytes``."""
    unit = "_total" if isinstance(metric, Counter) else UNITS.get(metric.unit, "")
    return f"{PREFIX}_{metric.name}{unit}"


def in_opentelemetry(metric: Counter | Duration | Gauge) -> str:
    """The metric's name there: ``idempotency.table_size``, with the unit beside it."""
    return f"{PREFIX}.{metric.name}"


def labels(operation: Operation) -> dict[str, str]:
    """What counts are told apart by: never whose key it was, or which."""
    return {"door": str(operation.door or ""), "view": operation.view}


# --- Counting --------------------------------------------------------------------------------------------------------

Receiver = Callable[[Counter, Operation, Mapping[str, Any]], None]


def listen(receive: Receiver, uid: Hashable) -> None:
    """Have ``receive`` called for each event; once, however often this is called with the same ``uid``."""
    for counter in COUNTERS:
        for signal in counter.signals:
            signal.connect(_receiving(receive, counter), weak=False, dispatch_uid=(uid, counter.name))


def stop_listening(uid: Hashable) -> None:
    for counter in COUNTERS:
        for signal in counter.signals:
            signal.disconnect(dispatch_uid=(uid, counter.name))


def _receiving(receive: Receiver, counter: Counter) -> Callable[..., None]:
    def hear(operation: Operation, **named: Any) -> None:
        receive(counter, operation, named)

    return hear


# --- The figures of the table ----------------------------------------------------------------------------------------

FRESH = 15.0  # seconds that figures are given again for, however often they are asked for
LONGEST = 2  # seconds that the database may spend on a statement

Figures = Mapping[str, float | None]


class Table:
    """The figures of ``stats()``, asked for so seldom, and with such a limit, that no scrape can hurt the database."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._figures: Figures | None = None

    def figures(self) -> Figures | None:
        """At most ``FRESH`` seconds old; ``None`` if the database did not give them, or not in time."""
        if not self._lock.acquire(timeout=LONGEST):  # somebody who asks has no answer: one is enough to wait for it
            return None
        try:
            if time.monotonic() - self._read_at >= FRESH:
                self._figures = _read()
                self._read_at = time.monotonic()
            return self._figures
        finally:
            self._lock.release()


table = Table()
os.register_at_fork(after_in_child=table._reset)


def samples(gauge: Gauge, figures: Figures | None) -> Iterator[tuple[str, float]]:
    """Quantile, or nothing, and value."""
    for quantile, name in gauge.fields.items():
        if (value := (figures or {}).get(name)) is not None:
            yield quantile, value


def _read() -> Figures | None:
    try:
        connection = connections[database()]
        # A scrape may come in a thread that nobody closes connections for.
        closed_after = closing(connection) if connection.connection is None else nullcontext()
        with closed_after, at_most(LONGEST, connection.alias):
            return asdict(stats(using=connection.alias))
    except Exception as error:
        log(logging.WARNING, "table_down", "idempotency figures could not be read: %s", cause(error))
        return None
