"""Prometheus, by ``prometheus_client``, with one process or many."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import prometheus_client
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    GAUGES,
    LABELS,
    RUN,
    TABLE_UP,
    Counter,
    in_prometheus,
    labels,
    listen,
    samples,
    stop_listening,
    table,
)
from django_idempotency.outcomes import Operation


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count into ``registry``, from now on, and have it tell the figures of the table. Twice is once."""
    listen(_counts(registry).receive, _uid(registry))


def uninstall(registry: CollectorRegistry = REGISTRY) -> None:
    """Count no more."""
    stop_listening(_uid(registry))


@non_atomic_requests
def scrape(request: HttpRequest) -> HttpResponse:
    """A view of all metrics of this process, or with ``PROMETHEUS_MULTIPROC_DIR`` of all processes that share it."""
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(TableCollector())
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


class TableCollector(Collector):
    """The figures of the table, read when they are asked for; left out when the database does not give them."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Their names, without asking the database."""
        for gauge in (*GAUGES, TABLE_UP):
            yield GaugeMetricFamily(in_prometheus(gauge), gauge.meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures = table.figures()
        for gauge in GAUGES:
            label = ["quantile"] if "" not in gauge.fields else []
            family = GaugeMetricFamily(in_prometheus(gauge), gauge.meaning, labels=label)
            for quantile, value in samples(gauge, figures):
                family.add_metric([quantile] if label else [], value)
            if family.samples:
                yield family
        yield GaugeMetricFamily(in_prometheus(TABLE_UP), TABLE_UP.meaning, value=figures is not None)


class _Counts:
    """This package's counters and its histogram in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters = {
            counter.name: prometheus_client.Counter(in_prometheus(counter), counter.meaning, LABELS, registry=registry)
            for counter in COUNTERS
        }
        self.run = prometheus_client.Histogram(
            in_prometheus(RUN), RUN.meaning, LABELS, buckets=RUN.buckets, registry=registry
        )
        self.known: set[tuple[str, ...]] = set()

    def receive(self, counter: Counter, operation: Operation, named: Mapping[str, Any]) -> None:
        given = tuple(labels(operation).values())
        if given not in self.known:
            self._begin_at_nought(given)
        self.counters[counter.name].labels(*given).inc()
        if "seconds" in named:
            self.run.labels(*given).observe(named["seconds"])

    def _begin_at_nought(self, given: tuple[str, ...]) -> None:
        """Or the first of a rare event would be no increase: there would be nothing before it."""
        self.known.add(given)
        for counter in self.counters.values():
            counter.labels(*given)


@cache
def _counts(registry: CollectorRegistry) -> _Counts:
    registry.register(TableCollector())
    return _Counts(registry)


def _uid(registry: CollectorRegistry) -> tuple[str, int]:
    return __name__, id(registry)
