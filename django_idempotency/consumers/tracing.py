"""The span of a message, in its publisher's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django_idempotency.conf import conf
from django_idempotency.consumers.messages import Message


@contextmanager
def message_span(message: Message) -> Iterator[None]:
    """If OpenTelemetry is on, open a consumer's span as a child of the message's ``traceparent``.

    Names and attributes: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
    """
    if "opentelemetry" not in conf().instrumentation:
        yield
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({name.lower(): value for name, value in message.headers.items()})
    attributes = {"messaging.destination.name": message.source, "messaging.operation.type": "process"}
    tracer = trace.get_tracer("django_idempotency")
    with tracer.start_as_current_span(
        f"process {message.source}", parent, kind=trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield
