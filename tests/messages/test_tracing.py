"""A message is handled in the trace that its publisher was in."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_idempotency.messages import Consumer, Message
from tests.messages.handlers import pay

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def spans(settings, monkeypatch, transactional_db):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": ["opentelemetry"]}
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def test_the_span_of_a_message_is_its_publishers_child(spans):
    Consumer("c", pay).consume(Message("payments", "1", b"{}", PARENT))
    (span,) = spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert (span.name, span.kind) == ("process payments", trace.SpanKind.CONSUMER)


@pytest.mark.parametrize("count", [1, 3])
def test_each_message_of_a_batch_has_its_own_span(spans, count):
    Consumer("c", pay).consume_many([Message("payments", str(id), b"{}", PARENT) for id in range(count)])
    assert [f"{span.context.trace_id:032x}" for span in spans()] == [TRACE] * count


def test_a_message_that_names_no_trace_begins_one(spans):
    Consumer("c", pay).consume(Message("payments", "1", b"{}", {"traceparent": "nonsense"}))
    (span,) = spans()
    assert span.parent is None


def test_without_the_setting_there_is_no_span(spans, settings):
    settings.IDEMPOTENCY = {}
    Consumer("c", pay).consume(Message("payments", "1", b"{}", PARENT))
    assert spans() == ()
