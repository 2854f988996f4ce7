"""Metrics and spans of OpenTelemetry."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_idempotency.instrumentation import metrics, opentelemetry
from django_idempotency.models import IdempotencyRecord
from django_idempotency.reporting import events
from tests.instrumentation.metered import (
    KEY,
    SECRET,
    SECRET_SCOPE,
    SECRET_SCOPE_OF,
    counted,
    everything,
)
from tests.support.callers import entry_point, paying

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def telemetry():
    """A reader of the metrics and an exporter of the spans, of the real SDK, and its
    tracer.
    """
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    with installed(reader, SimpleSpanProcessor(spans)) as tracer:
        yield reader, spans, tracer


@contextmanager
def installed(reader, processor):
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(processor)
    with patch.object(events.receivers, "_items", [*events.receivers]):
        opentelemetry.install(meters)
        yield tracers.get_tracer("tests")
    meters.shutdown()
    tracers.shutdown()


def points(reader):
    """Metric → points, of what the SDK has."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = (
        scope
        for scope in resource.scope_metrics
        if scope.scope.name == "django_idempotency"
    )
    return {metric.name: metric for metric in scope.metrics}


def test_opentelemetry_counts_the_same_without_secrets(telemetry, registry):
    reader, _spans, _tracer = telemetry
    everything()
    assert not [
        secret
        for secret in (KEY, SECRET_SCOPE, SECRET)
        if secret in reader.get_metrics_data().to_json()
    ]
    found = points(reader)
    by_counter = {
        counter.name: sum(
            point.value
            for point in found[metrics.in_opentelemetry(counter)].data.data_points
        )
        for counter in metrics.counters_of(None)
        if metrics.in_opentelemetry(counter) in found
    }
    assert by_counter == counted(registry)
    (hit,) = found["idempotency.response_replayed"].data.data_points
    assert dict(hit.attributes) == {
        "entry_point": "decorator",
        "view": "tests.support.callers.paying",
    }
    assert found["idempotency.run"].unit == "s"
    assert found["idempotency.table_up"].data.data_points[0].value == 1


def test_the_span_says_what_came_of_the_key_and_nothing_else(telemetry):
    _reader, spans, tracer = telemetry
    send = entry_point(paying, scope=SECRET_SCOPE_OF)
    for name in ("first", "second"):
        with tracer.start_as_current_span(name):
            send(KEY, SECRET.encode(), path=f"/pay/{SECRET}/")
    first, second = (dict(span.attributes) for span in spans.get_finished_spans())
    named = {
        "idempotency.entry_point": "decorator",
        "idempotency.view": "tests.support.callers.paying",
        "idempotency.record_id": str(IdempotencyRecord.objects.get().pk),
    }
    assert first == named | {
        "idempotency.outcome": "key_claimed",
        "idempotency.replayed": False,
        "idempotency.attempt": 1,
        "idempotency.verdict": "key_completed",
    }
    assert second == named | {
        "idempotency.outcome": "response_replayed",
        "idempotency.replayed": True,
    }
