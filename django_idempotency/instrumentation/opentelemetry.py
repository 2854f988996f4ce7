"""OpenTelemetry, through its API: metrics, and attributes on the current span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter
from opentelemetry.trace import SpanContext

import django_idempotency
from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.events import OUTBOX_EVENTS, Event, listen, stop_listening
from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    GAUGES,
    OUTBOX_COUNTERS,
    OUTBOX_GAUGES,
    RUN,
    TABLE_UP,
    Gauge,
    figures_by_database,
    figures_by_publisher,
    in_opentelemetry,
    labels,
    samples,
)
from django_idempotency.log_ids import shown_id
from django_idempotency.outcomes import Operation
from django_idempotency.traces import Trace

Observe = Callable[[CallbackOptions], Iterator[Observation]]


def install(meter_provider: MeterProvider | None = None) -> None:
    """Count with ``meter_provider``, by default that of the process, and mark spans. A second call changes nothing."""
    uid = (__name__, id(meter_provider))
    listen(_instruments(meter_provider).receive, uid)
    listen(_instruments(meter_provider).receive_of_outbox, uid, OUTBOX_EVENTS)


def uninstall(meter_provider: MeterProvider | None = None) -> None:
    """Stop counting and marking."""
    stop_listening((__name__, id(meter_provider)))


class _Instruments:
    def __init__(self, meter_provider: MeterProvider | None) -> None:
        meter = get_meter(django_idempotency.__name__, django_idempotency.__version__, meter_provider)
        self.counters = {
            counter.name: meter.create_counter(in_opentelemetry(counter), "{event}", counter.meaning)
            for counter in (*COUNTERS, *OUTBOX_COUNTERS)
        }
        self.run = meter.create_histogram(
            in_opentelemetry(RUN), RUN.unit, RUN.meaning, explicit_bucket_boundaries_advisory=RUN.buckets
        )
        for gauge in GAUGES:
            meter.create_observable_gauge(in_opentelemetry(gauge), [_observing(gauge)], gauge.unit, gauge.meaning)
        for gauge in OUTBOX_GAUGES:
            observing = [_observing_outbox(gauge)]
            meter.create_observable_gauge(in_opentelemetry(gauge), observing, gauge.unit, gauge.meaning)
        meter.create_observable_gauge(in_opentelemetry(TABLE_UP), [_observe_up], TABLE_UP.unit, TABLE_UP.meaning)

    def receive(self, event: Event, *, operation: Operation, **named: Any) -> None:
        self.counters[event.name].add(1, labels(operation, event))
        if "seconds" in named:
            self.run.record(named["seconds"], labels(operation))
        _mark_span(event, operation, named)

    def receive_of_outbox(self, event: Event, *, sender: str, count: int, **_named: Any) -> None:
        self.counters[event.name].add(count, {"publisher": sender})


@cache
def _instruments(meter_provider: MeterProvider | None) -> _Instruments:
    return _Instruments(meter_provider)


def _observing(gauge: Gauge) -> Observe:
    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        for database, figures in figures_by_database().items():
            for percentile, value in samples(gauge, figures):
                yield Observation(value, {"database": database} | ({"percentile": percentile} if percentile else {}))

    return observe


def _observing_outbox(gauge: Gauge) -> Observe:
    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        for publisher, figures in figures_by_publisher().items():
            for _percentile, value in samples(gauge, figures):
                yield Observation(value, {"publisher": publisher})

    return observe


def _observe_up(_options: CallbackOptions) -> Iterator[Observation]:
    for database, figures in figures_by_database().items():
        yield Observation(int(figures is not None), {"database": database})


def _mark_span(event: Event, operation: Operation, named: Mapping[str, Any]) -> None:
    span = trace.get_current_span()
    if not span.is_recording():
        return
    attributes: dict[str, Any] = {f"idempotency.{name}": value for name, value in labels(operation).items()}
    if event.is_outcome:
        replayed = event.signal is signals.response_replayed
        attributes |= {"idempotency.outcome": event.counted_as, "idempotency.replayed": replayed}
    else:
        attributes["idempotency.verdict"] = event.name
    if "attempt" in named:
        attributes["idempotency.attempt"] = named["attempt"]
    if conf().trace_record_id:
        attributes["idempotency.record_id"] = str(shown_id(operation.id))
    span.set_attributes(attributes)
    if run := Trace.of(named.get("trace")):
        span.add_link(SpanContext(int(run.trace_id, 16), int(run.span_id, 16), is_remote=True))
