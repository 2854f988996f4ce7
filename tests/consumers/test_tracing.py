"""A message is handled in the trace that its publisher was in."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_idempotency.consumers import Consumer, Message
from tests.consumers.handlers import pay
from tests.support.loops import run as in_a_loop

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


def test_each_message_of_a_batch_has_its_own_span(spans):
    Consumer("c", pay).consume_many([Message("payments", str(id), b"{}", PARENT) for id in range(3)])
    assert [f"{span.context.trace_id:032x}" for span in spans()] == [TRACE] * 3


def test_a_batch_of_one_has_its_span(spans):
    Consumer("c", pay).consume_many([Message("payments", "1", b"{}", PARENT)])
    assert [f"{span.context.trace_id:032x}" for span in spans()] == [TRACE]


def test_a_message_that_names_no_trace_begins_one(spans):
    Consumer("c", pay).consume(Message("payments", "1", b"{}", {"traceparent": "nonsense"}))
    (span,) = spans()
    assert span.parent is None


def test_without_the_setting_there_is_no_span(spans, settings):
    settings.IDEMPOTENCY = {}
    Consumer("c", pay).consume(Message("payments", "1", b"{}", PARENT))
    assert spans() == ()


@pytest.mark.mcp
def test_a_tool_call_is_in_the_trace_that_its_client_names(spans):
    from mcp import Client
    from mcp.server.mcpserver import MCPServer

    from django_idempotency.consumers.mcp import idempotent_tool

    @idempotent_tool(scope="public")
    def size(x: int) -> int:
        return abs(x)

    server = MCPServer("tools")
    server.add_tool(size)

    async def main():
        async with Client(server) as client:
            return await client.call_tool("size", {"x": -5}, meta={"idempotencyKey": "k", **PARENT})

    assert not in_a_loop(main).is_error
    (span,) = (span for span in spans() if span.name.startswith("process "))
    assert f"{span.context.trace_id:032x}" == TRACE
