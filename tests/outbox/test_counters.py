"""What happened to events is counted: by Prometheus, by OpenTelemetry, in the statistics and in the log."""

from __future__ import annotations

import logging

import pytest
from django.db import transaction
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from django_idempotency import signals
from django_idempotency.events import OUTBOX_EVENTS
from django_idempotency.instrumentation import metrics, opentelemetry, prometheus
from django_idempotency.models import IdempotencyCounter
from django_idempotency.outbox import maintenance
from django_idempotency.outbox.publishing import publish
from django_idempotency.stats import activity
from django_idempotency.stats.counters import counters
from tests.outbox.test_management import told
from tests.support.waiting import eventually

pytestmark = [pytest.mark.prometheus, pytest.mark.opentelemetry]

SEEN = {"outbox_published": 4, "outbox_failed": 2, "outbox_dead_lettered": 2, "outbox_requeued": 1}


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    prometheus.install(registry)
    yield registry
    prometheus.uninstall(registry)


@pytest.fixture
def reader():
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    opentelemetry.install(meters)
    yield reader
    opentelemetry.uninstall(meters)
    meters.shutdown()


@pytest.fixture
def seen(outbox, relay, registry, reader):
    """Three events are published; two fail once each and are dead letters then; one of these is requeued, and goes."""
    counters._reset()
    outbox(MAX_ATTEMPTS=2)
    with transaction.atomic():
        ids = [publish("good" if number < 3 else "bad", {"number": number}) for number in range(5)]
    one = relay()
    one.publisher.refuses = lambda event: "no" if event.topic == "bad" else None
    eventually(lambda: one.step() == 0 and maintenance.dead_letters().count() == 2)
    assert maintenance.requeue([ids[3]]) == 1
    one.publisher.refuses = lambda event: None
    eventually(lambda: one.step() == 0 and len(one.publisher.events) == 4)
    counters.flush()
    yield
    counters._reset()
    IdempotencyCounter.objects.all().delete()


def test_every_counter_of_the_outbox_counts_what_happened(seen, registry, reader):
    labels = {"publisher": "default"}
    scraped = {
        counter.name: registry.get_sample_value(metrics.in_prometheus(counter), labels)
        for counter in metrics.OUTBOX_COUNTERS
    }
    (resource,) = reader.get_metrics_data().resource_metrics
    (point,) = ({metric.name: metric.data.data_points for metric in scope.metrics} for scope in resource.scope_metrics)
    measured = {
        counter.name: [(data.value, dict(data.attributes)) for data in point[metrics.in_opentelemetry(counter)]]
        for counter in metrics.OUTBOX_COUNTERS
    }
    of_late = activity(3600)
    assert {event.name for event in OUTBOX_EVENTS} == SEEN.keys()
    assert scraped == SEEN
    assert measured == {name: [(count, labels)] for name, count in SEEN.items()}
    assert {name: getattr(of_late, name) for name in SEEN} == SEEN
    assert of_late.requests == 0


def test_the_statistics_show_what_happened_to_the_outbox(seen):
    lines = told("idempotency_stats").partition("OUTBOX")[2].splitlines()[1:5]
    assert [line.split()[-2 - line.endswith("!")] for line in lines] == ["4", "2", "2", "1"]


def test_dead_letters_and_their_requeue_are_in_the_log(caplog, outbox, relay):
    caplog.set_level(logging.INFO, "django_idempotency")
    outbox(MAX_ATTEMPTS=1)
    with transaction.atomic():
        publish("bad", {})
    one = relay()
    one.publisher.refuses = lambda event: "no"
    one.step()
    maintenance.requeue()
    logged = [(record.event, record.levelname) for record in caplog.records]
    assert logged == [("outbox_dead_lettered", "ERROR"), ("outbox_requeued", "INFO")]


def test_a_requeue_that_is_rolled_back_is_not_told(outbox, relay):
    outbox(MAX_ATTEMPTS=1)
    with transaction.atomic():
        publish("bad", {})
    one = relay()
    one.publisher.refuses = lambda event: "no"
    one.step()
    heard = []

    def hear(sender, count, **named):
        heard.append((sender, count))

    signals.outbox_requeued.connect(hear)
    try:
        with transaction.atomic():
            assert maintenance.requeue() == 1
            transaction.set_rollback(True)
        assert heard == []
        maintenance.requeue()
    finally:
        signals.outbox_requeued.disconnect(hear)
    assert heard == [("default", 1)]


def test_a_batch_is_told_once(outbox, relay):
    heard = []

    def hear(sender, count, using, **named):
        heard.append((sender, count, using))

    with transaction.atomic():
        for number in range(20):
            publish("good", {"number": number})
    signals.outbox_published.connect(hear)
    try:
        relay().run_once()
    finally:
        signals.outbox_published.disconnect(hear)
    assert heard == [("default", 20, "default")]
