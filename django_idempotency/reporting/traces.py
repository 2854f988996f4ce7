"""The OpenTelemetry trace of a run. The record stores it from the claim on, and replays link to it."""

from __future__ import annotations

from dataclasses import dataclass

from django_idempotency.conf import conf

TRACE_ID, SPAN_ID = 16, 8  # bytes


@dataclass(frozen=True, slots=True)
class Trace:
    """A span and its trace, by their ids of W3C Trace Context, in hexadecimal digits."""

    trace_id: str
    span_id: str

    @classmethod
    def of(cls, stored: bytes | memoryview | None) -> Trace | None:
        """Return the trace that a record's ``trace`` holds; ``None`` if there is none."""
        digits = bytes(stored or b"").hex()
        return cls(digits[: 2 * TRACE_ID], digits[2 * TRACE_ID :]) if len(digits) == 2 * (TRACE_ID + SPAN_ID) else None

    @property
    def url(self) -> str | None:
        """The URL that shows the trace, by the setting ``TRACE_URL``; ``None`` without that setting."""
        url = conf().trace_url
        return url and url.replace("{trace_id}", self.trace_id).replace("{span_id}", self.span_id)


def current_trace() -> bytes | None:
    """Return the ids of the current trace and span, as a record stores them.

    Return ``None`` if no span is open, or if ``INSTRUMENTATION`` does not include OpenTelemetry.
    """
    if "opentelemetry" not in conf().instrumentation:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return context.trace_id.to_bytes(TRACE_ID, "big") + context.span_id.to_bytes(SPAN_ID, "big")
