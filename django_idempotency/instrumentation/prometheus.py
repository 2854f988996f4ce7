"""Prometheus, through ``prometheus_client``, with one process or several."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import prometheus_client
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_idempotency.conf import conf
from django_idempotency.events import OUTBOX_EVENTS, Event, listen, stop_listening
from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    GAUGES,
    LABELS,
    OUTBOX_COUNTERS,
    OUTBOX_GAUGES,
    RUN,
    TABLE_UP,
    Counter,
    figures_by_database,
    figures_by_publisher,
    in_prometheus,
    labels,
    samples,
)
from django_idempotency.outcomes import Operation


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count into ``registry`` from now on, and add the figures of the table to it. A second call changes nothing."""
    listen(_counts(registry).receive, _uid(registry))
    listen(_counts(registry).receive_of_outbox, _uid(registry), OUTBOX_EVENTS)


def uninstall(registry: CollectorRegistry = REGISTRY) -> None:
    """Stop counting."""
    stop_listening(_uid(registry))


@non_atomic_requests
def scrape(request: HttpRequest) -> HttpResponse:
    """Respond as ``unguarded_scrape`` to requests with one of ``METRICS_TOKENS`` as bearer token; else with 401."""
    scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
    known = [constant_time_compare(token.strip(), known) for known in conf().metrics_tokens]
    if scheme.lower() == "bearer" and any(known):
        return unguarded_scrape(request)
    refused = "The metrics need a bearer token.\n"
    return HttpResponse(refused, "text/plain; charset=utf-8", 401, headers={"WWW-Authenticate": "Bearer"})


@non_atomic_requests
def unguarded_scrape(request: HttpRequest) -> HttpResponse:
    """Respond to ``request`` with all metrics of this process. Use it only for a URL that only Prometheus can reach.

    With ``PROMETHEUS_MULTIPROC_DIR``, respond with those of all processes that share the directory.
    """
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(TableCollector())
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


class TableCollector(Collector):
    """Collects the figures of the table, and of the outbox if there is one, at each scrape.

    Figures that the database does not give are left out.
    """

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the names of the figures, without querying the database."""
        for gauge in (*GAUGES, TABLE_UP, *OUTBOX_GAUGES):
            yield GaugeMetricFamily(in_prometheus(gauge), gauge.meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = figures_by_database()
        for gauge in GAUGES:
            label = ["percentile"] if "" not in gauge.fields else []
            family = GaugeMetricFamily(in_prometheus(gauge), gauge.meaning, labels=["database", *label])
            for database, figures in found.items():
                for percentile, value in samples(gauge, figures):
                    family.add_metric([database, percentile] if label else [database], value)
            if family.samples:
                yield family
        up = GaugeMetricFamily(in_prometheus(TABLE_UP), TABLE_UP.meaning, labels=["database"])
        for database, figures in found.items():
            up.add_metric([database], figures is not None)
        yield up
        yield from _of_outbox()


def _of_outbox() -> Iterator[GaugeMetricFamily]:
    found = figures_by_publisher()
    for gauge in OUTBOX_GAUGES if found else ():
        family = GaugeMetricFamily(in_prometheus(gauge), gauge.meaning, labels=["publisher"])
        for publisher, figures in found.items():
            for _percentile, value in samples(gauge, figures):
                family.add_metric([publisher], value)
        yield family


class _Counts:
    """This package's counters and its histogram in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters = {
            counter.name: prometheus_client.Counter(
                in_prometheus(counter), counter.meaning, counter.labels, registry=registry
            )
            for counter in (*COUNTERS, *OUTBOX_COUNTERS)
        }
        self.run = prometheus_client.Histogram(
            in_prometheus(RUN), RUN.meaning, LABELS, buckets=RUN.buckets, registry=registry
        )
        self.known: set[tuple[str, ...]] = set()

    def receive(self, event: Event, *, operation: Operation, **named: Any) -> None:
        given = labels(operation)
        self._start_at_zero(given, COUNTERS)
        self.counters[event.name].labels(**labels(operation, event)).inc()
        if "seconds" in named:
            self.run.labels(**given).observe(named["seconds"])

    def receive_of_outbox(self, event: Event, *, sender: str, count: int, **_named: Any) -> None:
        given = {"publisher": sender}
        self._start_at_zero(given, OUTBOX_COUNTERS)
        self.counters[event.name].labels(**given).inc(count)

    def _start_at_zero(self, given: dict[str, str], counters: Iterable[Counter]) -> None:
        """Create all counts with 0, so that Prometheus sees an increase when a rare event first happens."""
        if (values := tuple(given.values())) in self.known:
            return
        self.known.add(values)
        for counter in counters:
            for reason in [{"reason": reason} for reason in counter.reasons] or [{}]:
                self.counters[counter.name].labels(**given, **reason)


@cache
def _counts(registry: CollectorRegistry) -> _Counts:
    registry.register(TableCollector())
    return _Counts(registry)


def _uid(registry: CollectorRegistry) -> tuple[str, int]:
    return __name__, id(registry)
