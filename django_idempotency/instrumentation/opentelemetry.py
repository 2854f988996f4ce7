"""OpenTelemetry, through its API: metrics, and attributes on the current span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

import django_idempotency
from django_idempotency import signals
from django_idempotency.instrumentation.metrics import (
    RUN,
    Counter,
    Gauge,
    GaugeFamily,
    Instruments,
    figures,
    gauge_families,
    in_opentelemetry,
    labels,
    samples,
)
from django_idempotency.reporting.events import Event, Family, receivers
from django_idempotency.values.outcomes import Operation

# The other events are verdicts about a run.
OUTCOMES = ("key_claimed", "key_taken_over", "response_replayed", "request_rejected")


def install(meter_provider: MeterProvider | None = None) -> None:
    """Count with ``meter_provider``, by default that of the process, and mark spans. A
    second call changes nothing.
    """
    receivers.register(_instruments(meter_provider).receive)


class _Instruments(Instruments):
    def __init__(self, meter_provider: MeterProvider | None) -> None:
        self.meter = get_meter(
            django_idempotency.__name__, django_idempotency.__version__, meter_provider
        )
        self.run = self.meter.create_histogram(
            in_opentelemetry(RUN),
            RUN.unit,
            RUN.meaning,
            explicit_bucket_boundaries_advisory=RUN.buckets,
        )
        gauge_families.for_each(self._observe)
        super().__init__()

    def make(self, counter: Counter) -> metrics.Counter:
        return self.meter.create_counter(
            in_opentelemetry(counter), "{event}", counter.meaning
        )

    def _observe(self, family: GaugeFamily) -> None:
        for gauge in family.gauges:
            observe = partial(_observe, gauge, family)
            self.meter.create_observable_gauge(
                in_opentelemetry(gauge), [observe], gauge.unit, gauge.meaning
            )

    def count(
        self, event: Event, family: Family | None, given: dict[str, str], count: int
    ) -> None:
        self.counters[event.name].add(count, given | event.labels)

    def time(self, seconds: float, given: dict[str, str]) -> None:
        self.run.record(seconds, given)

    def receive(self, event: Event, family: Family | None, **named: Any) -> None:
        super().receive(event, family, **named)
        if family is None:
            _mark_span(event, named["operation"], named)


@cache
def _instruments(meter_provider: MeterProvider | None) -> _Instruments:
    return _Instruments(meter_provider)


def _observe(
    gauge: Gauge, family: GaugeFamily, _options: CallbackOptions
) -> Iterator[Observation]:
    for labels_of, value in samples(gauge, family, figures()):
        yield Observation(value, labels_of)


def _mark_span(event: Event, operation: Operation, named: Mapping[str, Any]) -> None:
    span = trace.get_current_span()
    if not span.is_recording():
        return
    shown = labels(None, None, operation) | {"record_id": str(operation.id)}
    attributes: dict[str, Any] = {
        f"idempotency.{name}": value for name, value in shown.items()
    }
    if event.name in OUTCOMES:
        replayed = event.signal is signals.response_replayed
        attributes |= {
            "idempotency.outcome": event.counted_as,
            "idempotency.replayed": replayed,
        }
    else:
        attributes["idempotency.verdict"] = event.name
    if "attempt" in named:
        attributes["idempotency.attempt"] = named["attempt"]
    span.set_attributes(attributes)
