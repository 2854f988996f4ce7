"""OpenTelemetry, through its API: metrics, and attributes on the current span."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

import django_idempotency
from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.instrumentation.metrics import (
    COUNTERS,
    RUN,
    Counter,
    Gauge,
    GaugeFamily,
    counters_of,
    figures,
    gauge_families,
    in_opentelemetry,
    labels,
    samples,
)
from django_idempotency.reporting.events import Event, Family, listen, listen_to_families, stop_listening
from django_idempotency.values.outcomes import Operation


def install(meter_provider: MeterProvider | None = None) -> None:
    """Count with ``meter_provider``, by default that of the process, and mark spans. A second call changes nothing."""
    uid = (__name__, id(meter_provider))
    listen(_instruments(meter_provider).receive, uid)
    listen_to_families(_instruments(meter_provider).receive_several, uid, _instruments(meter_provider).create)


def uninstall(meter_provider: MeterProvider | None = None) -> None:
    """Stop counting and marking."""
    stop_listening((__name__, id(meter_provider)))


class _Instruments:
    def __init__(self, meter_provider: MeterProvider | None) -> None:
        meter = get_meter(django_idempotency.__name__, django_idempotency.__version__, meter_provider)
        self.meter = meter
        self.counters: dict[str, metrics.Counter] = {}
        self.observed: set[str] = set()
        self._create(COUNTERS)
        self.run = meter.create_histogram(
            in_opentelemetry(RUN), RUN.unit, RUN.meaning, explicit_bucket_boundaries_advisory=RUN.buckets
        )
        self._observe_figures()

    def create(self, family: Family) -> None:
        self._create(counters_of(family))
        self._observe_figures()

    def _create(self, counters: Iterable[Counter]) -> None:
        for counter in counters:
            if counter.name not in self.counters:
                name = in_opentelemetry(counter)
                self.counters[counter.name] = self.meter.create_counter(name, "{event}", counter.meaning)

    def _observe_figures(self) -> None:
        for family in gauge_families():
            for gauge in family.gauges:
                if gauge.name not in self.observed:
                    self.observed.add(gauge.name)
                    observe = partial(_observe, gauge, family)
                    self.meter.create_observable_gauge(in_opentelemetry(gauge), [observe], gauge.unit, gauge.meaning)

    def receive(self, event: Event, *, operation: Operation, **named: Any) -> None:
        self.counters[event.name].add(1, labels(operation, event))
        if "seconds" in named:
            self.run.record(named["seconds"], labels(operation))
        _mark_span(event, operation, named)

    def receive_several(self, family: Family, event: Event, *, sender: str, count: int, **_named: Any) -> None:
        self.counters[event.name].add(count, {family.label: sender})


@cache
def _instruments(meter_provider: MeterProvider | None) -> _Instruments:
    return _Instruments(meter_provider)


def _observe(gauge: Gauge, family: GaugeFamily, _options: CallbackOptions) -> Iterator[Observation]:
    for labels_of, value in samples(gauge, family, figures()):
        yield Observation(value, labels_of)


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
        attributes["idempotency.record_id"] = str(operation.id)
    span.set_attributes(attributes)
