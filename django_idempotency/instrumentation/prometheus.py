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
from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    LABELS,
    RUN,
    Counter,
    counters_of,
    figures,
    gauge_families,
    in_prometheus,
    labels,
    samples,
)
from django_idempotency.reporting.events import Event, Family, listen, listen_to_families, stop_listening
from django_idempotency.values.outcomes import Operation


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count into ``registry`` from now on, and add the figures of the table to it. A second call changes nothing."""
    listen(_counts(registry).receive, _uid(registry))
    listen_to_families(_counts(registry).receive_several, _uid(registry), _counts(registry).create)


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
    """Collects the figures of the table, and those of wings, at each scrape.

    Figures that the database does not give are left out.
    """

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the names of the figures, without querying the database."""
        for family in gauge_families():
            for gauge in family.gauges:
                yield GaugeMetricFamily(in_prometheus(gauge), gauge.meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        reading = figures()
        for family in gauge_families():
            for gauge in family.gauges:
                found = list(samples(gauge, family, reading))
                names = [*found[0][0]] if found else []
                shown = GaugeMetricFamily(in_prometheus(gauge), gauge.meaning, labels=names)
                for labels_of, value in found:
                    shown.add_metric([*labels_of.values()], value)
                if found:
                    yield shown


class _Counts:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.counters: dict[str, prometheus_client.Counter] = {}
        self._create(COUNTERS)
        self.run = prometheus_client.Histogram(
            in_prometheus(RUN), RUN.meaning, LABELS, buckets=RUN.buckets, registry=registry
        )
        self.known: set[tuple[str, ...]] = set()

    def create(self, family: Family) -> None:
        self._create(counters_of(family))

    def _create(self, counters: Iterable[Counter]) -> None:
        for counter in counters:
            if counter.name not in self.counters:
                self.counters[counter.name] = prometheus_client.Counter(
                    in_prometheus(counter), counter.meaning, counter.labels, registry=self.registry
                )

    def receive(self, event: Event, *, operation: Operation, **named: Any) -> None:
        given = labels(operation)
        self._start_at_zero(given, COUNTERS)
        self.counters[event.name].labels(**labels(operation, event)).inc()
        if "seconds" in named:
            self.run.labels(**given).observe(named["seconds"])

    def receive_several(self, family: Family, event: Event, *, sender: str, count: int, **_named: Any) -> None:
        given = {family.label: sender}
        self._start_at_zero(given, counters_of(family))
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
