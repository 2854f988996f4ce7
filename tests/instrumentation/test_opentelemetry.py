"""Metrics and spans of OpenTelemetry."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_idempotency.instrumentation import metrics, opentelemetry
from tests.instrumentation.metered import KEY, SECRET, SECRET_SCOPE, counted, everything
from tests.support.callers import entry_point, operation, paying

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def telemetry():
    """A reader of the metrics and an exporter of the spans, of the real SDK, and its tracer."""
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    with installed(reader, SimpleSpanProcessor(spans)) as tracer:
        yield reader, spans, tracer


@contextmanager
def installed(reader, processor):
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(processor)
    opentelemetry.install(meters)
    try:
        yield tracers.get_tracer("tests")
    finally:
        opentelemetry.uninstall(meters)
        meters.shutdown()
        tracers.shutdown()


def points(reader):
    """Metric → points, of what the SDK has."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = (scope for scope in resource.scope_metrics if scope.scope.name == "django_idempotency")
    return {metric.name: metric for metric in scope.metrics}


def test_opentelemetry_counts_the_same(telemetry, registry):
    reader, _spans, _tracer = telemetry
    everything()
    found = points(reader)
    by_counter = {
        counter.name: sum(point.value for point in found[metrics.in_opentelemetry(counter)].data.data_points)
        for counter in metrics.COUNTERS
        if metrics.in_opentelemetry(counter) in found
    }
    assert by_counter == counted(registry)
    (hit,) = found["idempotency.response_replayed"].data.data_points
    assert dict(hit.attributes) == {"entry_point": "decorator", "view": "tests.support.callers.paying"}
    assert found["idempotency.run"].unit == "s"
    assert found["idempotency.table_up"].data.data_points[0].value == 1


def test_the_span_says_what_came_of_the_key(telemetry):
    _reader, spans, tracer = telemetry
    send = entry_point(paying)
    for name in ("first", "second"):
        with tracer.start_as_current_span(name):
            send()
    first, second = (dict(span.attributes) for span in spans.get_finished_spans())
    named = {"idempotency.entry_point": "decorator", "idempotency.view": "tests.support.callers.paying"}
    assert first == named | {
        "idempotency.outcome": "key_claimed",
        "idempotency.replayed": False,
        "idempotency.attempt": 1,
        "idempotency.verdict": "key_completed",
    }
    assert second == named | {"idempotency.outcome": "response_replayed", "idempotency.replayed": True}


def test_the_span_names_the_record_only_where_that_is_wanted(telemetry, settings):
    _reader, spans, tracer = telemetry
    settings.IDEMPOTENCY = {"TRACE_RECORD_ID": True}
    with tracer.start_as_current_span("named"):
        entry_point(paying)()
    (span,) = spans.get_finished_spans()
    assert span.attributes["idempotency.record_id"] == str(operation().id)


@contextmanager
def collector():
    """An OTLP collector: its address, and what it was sent, by path."""
    received: dict[str, list[bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_metrics_and_spans_and_no_secret():
    with collector() as (address, received):
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{address}/v1/metrics"), 3_600_000)
        processor = SimpleSpanProcessor(OTLPSpanExporter(f"{address}/v1/traces"))
        with installed(reader, processor) as tracer:
            with tracer.start_as_current_span("request"):
                everything()
            reader.force_flush()
    sent = ExportMetricsServiceRequest.FromString(received["/v1/metrics"][0])
    names = {metric.name for scope in sent.resource_metrics[0].scope_metrics for metric in scope.metrics}
    assert {
        "idempotency.key_claimed",
        "idempotency.response_replayed",
        "idempotency.run",
        "idempotency.pending",
    } <= names
    traced = ExportTraceServiceRequest.FromString(received["/v1/traces"][0])
    (span,) = traced.resource_spans[0].scope_spans[0].spans
    assert "idempotency.outcome" in {attribute.key for attribute in span.attributes}
    for body in (body for bodies in received.values() for body in bodies):
        assert not [secret for secret in (KEY, SECRET_SCOPE, SECRET) if secret.encode() in body]
