"""OpenTelemetry, by its API: metrics, and attributes on the span that is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

import django_idempotency
from django_idempotency.conf import conf
from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    GAUGES,
    RUN,
    TABLE_UP,
    Counter,
    Gauge,
    in_opentelemetry,
    labels,
    listen,
    samples,
    stop_listening,
    table,
)
from django_idempotency.outcomes import Operation

Observe = Callable[[CallbackOptions], Iterator[Observation]]


def install(meter_provider: MeterProvider | None = None) -> None:
    """Count by ``meter_provider``, the process's unless stated, and mark spans. Twice is once."""
    listen(_instruments(meter_provider).receive, (__name__, id(meter_provider)))


def uninstall(meter_provider: MeterProvider | None = None) -> None:
    """Count and mark no more."""
    stop_listening((__name__, id(meter_provider)))


class _Instruments:
    def __init__(self, meter_provider: MeterProvider | None) -> None:
        meter = get_meter(django_idempotency.__name__, django_idempotency.__version__, meter_provider)
        self.counters = {
            counter.name: meter.create_counter(in_opentelemetry(counter), "{event}", counter.meaning)
            for counter in COUNTERS
        }
        self.run = meter.create_histogram(
            in_opentelemetry(RUN), RUN.unit, RUN.meaning, explicit_bucket_boundaries_advisory=RUN.buckets
        )
        for gauge in GAUGES:
            meter.create_observable_gauge(in_opentelemetry(gauge), [_observing(gauge)], gauge.unit, gauge.meaning)
        meter.create_observable_gauge(in_opentelemetry(TABLE_UP), [_observe_up], TABLE_UP.unit, TABLE_UP.meaning)

    def receive(self, counter: Counter, operation: Operation, named: Mapping[str, Any]) -> None:
        self.counters[counter.name].add(1, labels(operation))
        if "seconds" in named:
            self.run.record(named["seconds"], labels(operation))
        _mark_span(counter, operation, named)


@cache
def _instruments(meter_provider: MeterProvider | None) -> _Instruments:
    return _Instruments(meter_provider)


def _observing(gauge: Gauge) -> Observe:
    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        for quantile, value in samples(gauge, table.figures()):
            yield Observation(value, {"quantile": quantile} if quantile else {})

    return observe


def _observe_up(_options: CallbackOptions) -> Iterator[Observation]:
    yield Observation(int(table.figures() is not None))


def _mark_span(counter: Counter, operation: Operation, named: Mapping[str, Any]) -> None:
    span = trace.get_current_span()
    if not span.is_recording():
        return
    attributes: dict[str, Any] = {f"idempotency.{name}": value for name, value in labels(operation).items()}
    if counter.of_claim:
        attributes |= {"idempotency.outcome": counter.name, "idempotency.replayed": counter.name == "hit"}
    else:
        attributes["idempotency.verdict"] = counter.name
    if "attempt" in named:
        attributes["idempotency.attempt"] = named["attempt"]
    if conf().trace_record_id:
        attributes["idempotency.record_id"] = str(operation.id)
    span.set_attributes(attributes)
