"""Metrics, spans and log records: what is counted is what happened, and none of it tells whose key it was."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, OperationalError, connection, connections
from django.http import HttpResponse
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_idempotency import instrumentation
from django_idempotency.instrumentation import metrics, opentelemetry, prometheus
from django_idempotency.logs import cause
from django_idempotency.policy import Policy
from django_idempotency.stats import Stats
from tests.callers import claim, door, operation, paying, shift
from tests.threads import in_threads
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "docs" / "monitoring"
LEASE = {"mode": "lease", "lease": 60}
KEY, SECRET_SCOPE, SECRET = "the-raw-key", "user:4711", "s3cret"


@pytest.fixture(autouse=True)
def fresh_figures():
    """No figures of an earlier test's table."""
    metrics.table._reset()
    yield
    metrics.table._reset()


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    prometheus.install(registry)
    yield registry
    prometheus.uninstall(registry)


def samples(text):
    """Sample name → labels → value, of a scrape."""
    found: dict[str, dict[frozenset, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def total(text, name):
    return sum(samples(text).get(f"idempotency_{name}_total", {}).values())


def counted(registry):
    """The counters that are not nought."""
    text = generate_latest(registry).decode()
    return {counter.name: total(text, counter.name) for counter in metrics.COUNTERS if total(text, counter.name)}


def refusing(request):
    return HttpResponse(status=422)


def everything():
    """One of most things that can happen to a key, as somebody with a secret."""
    policy = {"scope": SECRET_SCOPE_OF, **LEASE}
    send = door(paying, **policy)
    send(KEY, path=f"/pay/{SECRET}/")
    send(KEY, path=f"/pay/{SECRET}/")
    send(KEY, SECRET.encode())
    door(refusing, **policy)("released")
    claim("reaped", policy=Policy(**LEASE))
    shift("reaped", locked_until=-1)
    door(paying, **LEASE)("reaped")
    claim("busy", policy=Policy(**LEASE))
    door(paying, **LEASE)("busy")


def SECRET_SCOPE_OF(request):
    return SECRET_SCOPE


# --- Prometheus ------------------------------------------------------------------------------------------------------


def test_each_event_is_counted_once_by_door_and_view(registry):
    everything()
    expected = {"miss": 5, "takeover": 1, "hit": 1, "mismatch": 1, "conflict": 1, "completed": 2, "released": 1}
    assert counted(registry) == expected
    (hit,) = [labels for labels, value in samples(scraped(registry))["idempotency_hit_total"].items() if value]
    assert dict(hit) == {"door": "decorator", "view": "tests.callers.paying"}


def scraped(registry):
    return generate_latest(registry).decode()


def test_installing_twice_counts_once(registry):
    prometheus.install(registry)
    door(paying)()
    assert counted(registry) == {"miss": 1, "completed": 1}


def test_a_rare_event_is_there_at_nought_before_it_happens(registry):
    door(paying)()
    assert samples(scraped(registry))["idempotency_stale_write_rejected_total"] == {
        frozenset({("door", "decorator"), ("view", "tests.callers.paying")}): 0
    }


def test_runs_are_timed(registry):
    door(paying)()
    (count,) = samples(scraped(registry))["idempotency_run_seconds_count"].values()
    (seconds,) = samples(scraped(registry))["idempotency_run_seconds_sum"].values()
    assert (count, 0 < seconds < 60) == (1, True)


def test_the_figures_are_those_of_the_table(registry):
    claim(policy=Policy(**LEASE))
    shift(locked_at=-100, locked_until=-1)
    found = samples(scraped(registry))
    assert found["idempotency_pending"] == found["idempotency_stuck"] == {frozenset(): 1}
    ages = {dict(labels)["quantile"]: value for labels, value in found["idempotency_pending_age_seconds"].items()}
    assert ages.keys() == {"0.5", "0.95", "0.99", "1"}
    assert all(100 <= age < 200 for age in ages.values())
    assert found["idempotency_table_up"] == {frozenset(): 1}


def test_every_figure_is_one_that_there_is():
    assert {name for gauge in metrics.GAUGES for name in gauge.fields.values()} <= Stats.__dataclass_fields__.keys()


def test_many_scrapes_ask_the_database_once(registry, django_assert_num_queries):
    scraped(registry)
    with django_assert_num_queries(0):
        scraped(registry)


def test_a_database_that_fails_leaves_its_figures_out_and_the_counts_in(registry, other_thread, monkeypatch, caplog):
    door(paying)()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        text = other_thread(scraped, registry)
    assert samples(text)["idempotency_table_up"] == {frozenset(): 0}
    assert "idempotency_pending" not in samples(text)
    assert total(text, "miss") == 1
    assert [record.event for record in caplog.records] == ["table_down"]


@pytest.mark.postgresql
def test_a_slow_database_has_seconds_and_no_more(registry, monkeypatch, other_thread, caplog):
    monkeypatch.setattr(metrics, "LONGEST", 0.1)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("LOCK TABLE django_idempotency_record IN ACCESS EXCLUSIVE MODE")
        text = other_thread(scraped, registry)
        cursor.execute("ROLLBACK")
    assert samples(text)["idempotency_table_up"] == {frozenset(): 0}
    assert "57014" in caplog.text


@pytest.mark.row_locks
def test_while_a_scrape_waits_for_a_database_that_hangs_others_are_answered(registry, monkeypatch):
    """It takes the connection and says nothing, so there is no statement yet that could have a limit."""
    monkeypatch.setattr(metrics, "LONGEST", 0.1)
    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as patch, ExitStack() as stack:
        silent = socket.create_server(("127.0.0.1", 0))
        silent.settimeout(30)
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", silent.getsockname()[1])
        first = pool.submit(_scraped_elsewhere, registry)
        stack.enter_context(silent.accept()[0])
        stack.enter_context(silent)  # closed first, so that nobody tries again
        text = pool.submit(_scraped_elsewhere, registry).result(30)
        assert not first.done()
        assert samples(text)["idempotency_table_up"] == {frozenset(): 0}
        assert "idempotency_pending" not in samples(text)
    assert samples(first.result())["idempotency_table_up"] == {frozenset(): 0}


def _scraped_elsewhere(registry):
    try:
        return scraped(registry)
    finally:
        connections.close_all()


def test_a_scrape_leaves_no_connection_behind(registry, other_thread):
    other_thread(scraped, registry)
    assert other_thread(lambda: connection.connection) is None


@pytest.fixture
def multi_process_server(start_server, tmp_path):
    """Two gunicorn workers that share their metrics."""
    directory = tmp_path / "metrics"
    directory.mkdir()
    return start_server(INSTRUMENTATION="prometheus", PROMETHEUS_MULTIPROC_DIR=str(directory)), directory


@pytest.mark.server
def test_with_two_workers_a_scrape_of_either_tells_of_both(multi_process_server):
    server, directory = multi_process_server
    keys = 0

    def pay(index):
        body = {"amount": 1, "currency": "EUR", "reference": f"scrape-{keys}-{index}"}
        for _time in range(2):
            assert server.post("/api/charges/", body, key=f"{KEY}-{keys}-{index}").status_code == 201

    def both_have_counted():
        nonlocal keys
        in_threads(8, pay)
        keys += 8
        return len(list(directory.glob("counter_*.db"))) == 2

    assert eventually(both_have_counted)
    for _time in range(8):
        text = server.http.get("/metrics/").text
        assert (total(text, "miss"), total(text, "hit"), total(text, "completed")) == (keys, keys, keys)
        assert samples(text)["idempotency_table_up"] == {frozenset(): 1}
    assert KEY not in text
    assert "scrape-" not in text
    assert set(re.findall(r'door="(\w+)",view="([\w.]+)"', text)) == {("mixin", "testproject.api.ChargeViewSet")}
    assert used_metrics() <= set(samples(text))


@pytest.mark.server
def test_with_one_process_a_scrape_tells_the_same(start_server):
    server = start_server(INSTRUMENTATION="prometheus", workers=1)
    assert (
        server.post("/api/charges/", {"amount": 1, "currency": "EUR", "reference": "one"}, key=KEY).status_code == 201
    )
    text = server.http.get("/metrics/").text
    assert (total(text, "miss"), total(text, "completed")) == (1, 1)
    assert used_metrics() <= set(samples(text))


# --- What is made of them: alerts and a dashboard --------------------------------------------------------------------


def alert_rules():
    return yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]


def panel_expressions():
    board = json.loads((MONITORING / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def used_metrics():
    expressions = [rule["expr"] for rule in alert_rules()] + panel_expressions()
    # Sizes are told by those databases alone that estimate them.
    return set(re.findall(r"idempotency_\w+", " ".join(expressions))) - {
        metrics.in_prometheus(gauge) for gauge in metrics.GAUGES if gauge.name.startswith("table_")
    }


def test_alerts_and_dashboard_use_metrics_that_there_are():
    known = {metrics.in_prometheus(metric) for metric in (*metrics.COUNTERS, *metrics.GAUGES, metrics.TABLE_UP)}
    known |= {f"{metrics.in_prometheus(metrics.RUN)}_{part}" for part in ("bucket", "sum", "count")}
    expressions = " ".join([rule["expr"] for rule in alert_rules()] + panel_expressions())
    assert set(re.findall(r"idempotency_\w+", expressions)) <= known


def promtool(*arguments):
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.promtool
def test_prometheus_takes_the_alert_rules():
    checked = promtool("check", "rules", MONITORING / "alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
def test_prometheus_takes_every_expression_of_the_dashboard(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(panel_expressions())
    ]
    assert len(rules) > 8
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


LABELLED = '{door="mixin",view="shop.views.Pay"}'
# What makes each alert fire: series, by minute, for two hours.
FIRES = {
    "IdempotencyStoreFails": {"idempotency_store_error_total" + LABELLED: "0+5x120"},
    "IdempotencyRetriesAreMany": {
        "idempotency_hit_total" + LABELLED: "0+10x120",
        "idempotency_miss_total" + LABELLED: "0+100x120",
    },
    "IdempotencyConflictsAreMany": {
        "idempotency_conflict_total" + LABELLED: "0+20x120",
        "idempotency_miss_total" + LABELLED: "0+100x120",
    },
    "IdempotencyKeysAreMisused": {
        "idempotency_mismatch_total" + LABELLED: "0+5x120",
        "idempotency_miss_total" + LABELLED: "0+100x120",
    },
    "IdempotencyHoldersDie": {
        "idempotency_takeover_total" + LABELLED: "0+5x120",
        "idempotency_miss_total" + LABELLED: "0+100x120",
    },
    "IdempotencyStaleWrites": {"idempotency_stale_write_rejected_total" + LABELLED: "0x60 1x60"},
    "IdempotencyKeysAreHeld": {"idempotency_held_total" + LABELLED: "0x60 1x60"},
    "IdempotencyWaitsInVain": {"idempotency_pending_timeout_total" + LABELLED: "0+2x120"},
    "IdempotencyKeysAreStuck": {"idempotency_stuck": "3x120"},
    "IdempotencyPendingTooLong": {'idempotency_pending_age_seconds{quantile="0.99"}': "900x120"},
    "IdempotencyCleanupLags": {"idempotency_cleanup_lag_seconds": "7200x120"},
    "IdempotencyFiguresMissing": {"idempotency_table_up": "0x120"},
}
WELL = {
    "idempotency_miss_total" + LABELLED: "0+1000x120",
    "idempotency_hit_total" + LABELLED: "0+2x120",
    "idempotency_table_up": "1x120",
    "idempotency_stuck": "0x120",
    **{
        f"idempotency_{name}_total{LABELLED}": "0x120"
        for name in (
            "store_error",
            "stale_write_rejected",
            "held",
            "pending_timeout",
            "takeover",
            "mismatch",
            "conflict",
        )
    },
}


def firing(tmp_path, series, expected):
    """Whether exactly ``expected`` alerts fire after an hour and five minutes."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "65m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "tests": [test]}))
    checked = promtool("test", "rules", file)
    return checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_should(alert, tmp_path):
    fires, why = firing(tmp_path, FIRES[alert], [alert])
    assert fires, why


@pytest.mark.promtool
def test_no_alert_fires_when_all_is_well(tmp_path):
    fires, why = firing(tmp_path, WELL, [])
    assert fires, why


def test_every_alert_is_seen_to_fire():
    assert [rule["alert"] for rule in alert_rules()] == list(FIRES)


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


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
    (hit,) = found["idempotency.hit"].data.data_points
    assert dict(hit.attributes) == {"door": "decorator", "view": "tests.callers.paying"}
    assert found["idempotency.run"].unit == "s"
    assert found["idempotency.table_up"].data.data_points[0].value == 1


def test_the_span_says_what_came_of_the_key(telemetry):
    _reader, spans, tracer = telemetry
    send = door(paying)
    for name in ("first", "second"):
        with tracer.start_as_current_span(name):
            send()
    first, second = (dict(span.attributes) for span in spans.get_finished_spans())
    named = {"idempotency.door": "decorator", "idempotency.view": "tests.callers.paying"}
    assert first == named | {
        "idempotency.outcome": "miss",
        "idempotency.replayed": False,
        "idempotency.attempt": 1,
        "idempotency.verdict": "completed",
    }
    assert second == named | {"idempotency.outcome": "hit", "idempotency.replayed": True}


def test_the_span_names_the_record_only_where_that_is_wanted(telemetry, settings):
    _reader, spans, tracer = telemetry
    settings.IDEMPOTENCY = {"TRACE_RECORD_ID": True}
    with tracer.start_as_current_span("named"):
        door(paying)()
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
    assert {"idempotency.miss", "idempotency.hit", "idempotency.run", "idempotency.pending"} <= names
    traced = ExportTraceServiceRequest.FromString(received["/v1/traces"][0])
    (span,) = traced.resource_spans[0].scope_spans[0].spans
    assert "idempotency.outcome" in {attribute.key for attribute in span.attributes}
    for body in (body for bodies in received.values() for body in bodies):
        assert not [secret for secret in (KEY, SECRET_SCOPE, SECRET) if secret.encode() in body]


# --- Log records -----------------------------------------------------------------------------------------------------


def test_log_records_have_fields_and_no_secret(caplog, registry):
    caplog.set_level(logging.DEBUG, "django_idempotency")
    everything()
    records = [record for record in caplog.records if record.name == "django_idempotency"]
    assert [(record.event, record.levelname) for record in records] == [
        ("mismatch", "WARNING"),
        ("takeover", "WARNING"),
    ]
    assert {(record.door, record.view) for record in records} == {("decorator", "tests.callers.paying")}
    assert records[-1].attempt == 2
    assert records[-1].record_id == str(operation("reaped").id)
    told = " ".join(str(record.__dict__) for record in records) + scraped(registry)
    assert [secret for secret in (KEY, SECRET_SCOPE, SECRET) if secret in told] == []


@pytest.mark.postgresql
def test_an_error_of_the_database_is_told_without_what_it_quotes():
    with pytest.raises(DataError) as raised, connection.cursor() as cursor:
        cursor.execute("SELECT %s::integer", [SECRET])
    assert SECRET in str(raised.value)
    assert cause(raised.value) == "DataError 22P02"


def test_an_error_on_the_way_to_the_database_is_told_as_it_is(other_thread, monkeypatch):
    def fail():
        with pytest.raises(OperationalError) as raised:
            connection.ensure_connection()
        return cause(raised.value)

    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert other_thread(fail).startswith("OperationalError")


# --- The setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["prometheus", ["prometeus"], [1]])
def test_what_there_is_not_is_left_to_the_checks(wrong, settings):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": wrong}
    instrumentation.install()


def test_a_library_that_is_missing_is_named(settings, monkeypatch):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": ["prometheus"]}
    name = prometheus.__name__
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImproperlyConfigured, match=r"django-idempotency\[prometheus\]"):
            instrumentation.install()
