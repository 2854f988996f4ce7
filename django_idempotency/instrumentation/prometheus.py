"""Prometheus, through ``prometheus_client``, with one process or several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

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
    LABELS,
    RUN,
    Counter,
    Instruments,
    events_of,
    figures,
    gauge_families,
    in_prometheus,
    samples,
)
from django_idempotency.reporting.events import Event, Family, receivers


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count into ``registry`` from now on, and add the figures of the table to it. A
    second call changes nothing.
    """
    receivers.register(_counts(registry).receive)


@non_atomic_requests
def scrape(request: HttpRequest) -> HttpResponse:
    """Respond as ``unguarded_scrape`` to requests with one of ``METRICS_TOKENS`` as
    bearer token; else with 401.
    """
    scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
    known = [
        constant_time_compare(token.strip(), known) for known in conf().metrics_tokens
    ]
    if scheme.lower() == "bearer" and any(known):
        return unguarded_scrape(request)
    refused = "The metrics need a bearer token.\n"
    return HttpResponse(
        refused,
        "text/plain; charset=utf-8",
        401,
        headers={"WWW-Authenticate": "Bearer"},
    )


@non_atomic_requests
def unguarded_scrape(request: HttpRequest) -> HttpResponse:
    """Respond to ``request`` with all metrics of this process. Use it only for a URL
    that only Prometheus can reach.

    With ``PROMETHEUS_MULTIPROC_DIR``, respond with those of all processes that share
    the directory.
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
        for family in gauge_families:
            for gauge in family.gauges:
                yield GaugeMetricFamily(in_prometheus(gauge), gauge.meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        reading = figures()
        for family in gauge_families:
            for gauge in family.gauges:
                shown = GaugeMetricFamily(in_prometheus(gauge), gauge.meaning)
                for labels, value in samples(gauge, family, reading):
                    shown.add_sample(shown.name, labels, value)
                if shown.samples:
                    yield shown


class _Counts(Instruments):
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.run = prometheus_client.Histogram(
            in_prometheus(RUN),
            RUN.meaning,
            LABELS,
            buckets=RUN.buckets,
            registry=registry,
        )
        self.known: set[tuple[str, ...]] = set()
        super().__init__()

    def make(self, counter: Counter) -> prometheus_client.Counter:
        return prometheus_client.Counter(
            in_prometheus(counter),
            counter.meaning,
            counter.labels,
            registry=self.registry,
        )

    def count(
        self, event: Event, family: Family | None, given: dict[str, str], count: int
    ) -> None:
        self._start_at_zero(given, family)
        self.counters[event.name].labels(**given, **event.labels).inc(count)

    def time(self, seconds: float, given: dict[str, str]) -> None:
        self.run.labels(**given).observe(seconds)

    def _start_at_zero(self, given: dict[str, str], family: Family | None) -> None:
        """Create all counts with 0, so that Prometheus sees an increase when a rare
        event first happens.
        """
        if (values := tuple(given.values())) in self.known:
            return
        self.known.add(values)
        for event in events_of(family):
            self.counters[event.name].labels(**given, **event.labels)


@cache
def _counts(registry: CollectorRegistry) -> _Counts:
    registry.register(TableCollector())
    return _Counts(registry)
