"""The trace of a run is in its record: replays link to it, and operators are led to it."""

from __future__ import annotations

import json

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.http import HttpResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_idempotency import engine
from django_idempotency.decorators import idempotent
from django_idempotency.instrumentation import opentelemetry
from django_idempotency.maintenance import erase
from django_idempotency.policy import Lease, Policy
from django_idempotency.reporting.traces import Trace
from tests.support.callers import SCOPE, claim, entry_point, operation, paying, post, record, shift
from tests.support.checks import found

pytestmark = pytest.mark.usefixtures("payer")

URL = "https://traces.example.com/trace/{trace_id}?span={span_id}"


@pytest.fixture
def spans(settings):
    """``spans(name)``: open a span of the real SDK; ``spans.ended()``: those that have ended."""
    settings.IDEMPOTENCY = {"INSTRUMENTATION": ["opentelemetry"], "TRACE_URL": URL}
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    opentelemetry.install()

    class Spans:
        ended = staticmethod(exporter.get_finished_spans)

        def __call__(self, name):
            return tracer.start_as_current_span(name)

    yield Spans()
    opentelemetry.uninstall()
    provider.shutdown()


def of(span):
    return Trace(f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_replay_links_to_the_run_that_it_is_of(spans, mode):
    send = entry_point(paying, mode=mode)
    for name in ("run", "replay", "another replay"):
        with spans(name):
            send()
    run, *replays = spans.ended()
    assert Trace.of(record().trace) == of(run)
    assert list(run.links) == []
    for replay in replays:
        (link,) = replay.links
        assert (link.context.trace_id, link.context.span_id) == (run.context.trace_id, run.context.span_id)
        assert replay.context.trace_id != run.context.trace_id


def test_the_record_of_an_async_view_has_the_trace(spans):
    async def view(request):
        return HttpResponse("done")

    protected = idempotent(scope=SCOPE, mode=Lease(on_crash="retry"))(view)

    async def send(name):
        with spans(name):
            await protected(post())

    for name in ("run", "replay"):
        async_to_sync(send)(name)
    run, replay = spans.ended()
    assert Trace.of(record().trace) == of(run)
    assert [link.context.span_id for link in replay.links] == [run.context.span_id]


def test_the_records_of_a_batch_have_the_trace(spans):
    wanted = [operation(key) for key in ("a", "b")]
    with spans("batch"):
        engine.claim_many(wanted, Policy(mode="lease"))
    (batch,) = spans.ended()
    assert [Trace.of(record(key).trace) for key in ("a", "b")] == [of(batch)] * 2


def test_the_record_tells_the_trace_while_the_run_goes_on_and_that_of_the_last_run(spans):
    policy = Policy(mode="lease")
    with spans("first"):
        claim(policy=policy)
    (first,) = spans.ended()
    assert Trace.of(record().trace) == of(first)
    shift(locked_until=-1)
    with spans("takeover"):
        entry_point(paying, mode="lease")()
    assert Trace.of(record().trace) == of(spans.ended()[1])


def test_without_a_span_or_the_setting_nothing_is_stored(spans, settings):
    entry_point(paying)("no-span")
    settings.IDEMPOTENCY = {}
    with spans("no setting"):
        entry_point(paying)("no-setting")
        entry_point(paying)("no-setting")
    assert (record("no-span").trace, record("no-setting").trace) == (None, None)
    assert [list(span.links) for span in spans.ended()] == [[]]


def test_an_erased_record_has_no_trace(spans):
    with spans("run"):
        entry_point(paying)()
    erase(SCOPE, bodies=True)
    assert record().trace is None


def test_the_command_leads_to_the_trace(spans, capsys):
    with spans("run"):
        entry_point(paying)()
    (run,) = map(of, spans.ended())
    url = URL.replace("{trace_id}", run.trace_id).replace("{span_id}", run.span_id)
    call_command("idempotency_keys", "show", "k")
    assert f"trace           {run.trace_id} {url}\n" in capsys.readouterr().out
    call_command("idempotency_keys", "show", "k", "--json")
    shown = json.loads(capsys.readouterr().out)["trace"]
    assert shown == {"trace_id": run.trace_id, "span_id": run.span_id, "url": url}


@pytest.mark.parametrize("stored", [None, b"", b"short", bytes(25)])
def test_stored_bytes_that_are_not_a_trace_are_none(stored):
    assert Trace.of(stored) is None


@pytest.mark.parametrize(
    "url", ["https://traces.example.com/", "javascript:{trace_id}", "//{trace_id}", "https://x/{trace_id} b", 1, ""]
)
def test_a_url_that_leads_to_no_trace_is_refused(settings, url):
    settings.IDEMPOTENCY = {"TRACE_URL": url}
    (error,) = found(databases=())
    assert (error.id, "TRACE_URL" in error.msg) == ("django_idempotency.E001", True)
