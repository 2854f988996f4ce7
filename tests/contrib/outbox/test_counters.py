"""What happened to events is counted: by Prometheus, by OpenTelemetry, in the
statistics and in the log.
"""

from __future__ import annotations

import logging

import pytest
from django.db import transaction
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from django_idempotency.contrib.dashboard.activity import activity
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.contrib.outbox import signals
from django_idempotency.contrib.outbox.maintenance import Act, dead_letters, decide
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.instrumentation import metrics, opentelemetry
from tests.contrib.outbox.events import publish_all, told
from tests.instrumentation.conftest import registry
from tests.support.callers import heard
from tests.support.waiting import eventually

__all__ = ["registry"]

pytestmark = [pytest.mark.prometheus, pytest.mark.opentelemetry]

SEEN = {
    "outbox_published": 4,
    "outbox_failed": 2,
    "outbox_dead_lettered": 2,
    "outbox_requeued": 1,
}


@pytest.fixture
def reader(registry):  # it ends the listening of both
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    opentelemetry.install(meters)
    yield reader
    meters.shutdown()


@pytest.fixture
def seen(outbox, relay, registry, reader):
    """Three events are published; two fail once each and are dead letters then; one of
    these is requeued, and goes.
    """
    counters._reset()
    outbox(MAX_ATTEMPTS=2)
    with transaction.atomic():
        ids = [
            publish("good" if number < 3 else "bad", {"number": number})
            for number in range(5)
        ]
    one = relay(refusing="bad")
    eventually(lambda: one.step() == 0 and dead_letters().count() == 2)
    assert decide(Act.REQUEUE, dead_letters([ids[3]]))[0] == 1
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
        for counter in metrics.counters_of(signals.FAMILY)
    }
    (resource,) = reader.get_metrics_data().resource_metrics
    (point,) = (
        {metric.name: metric.data.data_points for metric in scope.metrics}
        for scope in resource.scope_metrics
    )
    measured = {
        counter.name: [
            (data.value, dict(data.attributes))
            for data in point[metrics.in_opentelemetry(counter)]
        ]
        for counter in metrics.counters_of(signals.FAMILY)
    }
    of_late = activity(3600)
    assert {event.name for event in signals.FAMILY.events} == SEEN.keys()
    assert scraped == SEEN
    assert measured == {name: [(count, labels)] for name, count in SEEN.items()}
    assert {name: of_late[name] for name in SEEN} == SEEN
    assert of_late["requests"] == 0


def test_the_statistics_show_what_happened_to_the_outbox(seen):
    lines = told("idempotency_stats").partition("OUTBOX")[2].splitlines()[1:5]
    assert [line.split()[-2 - line.endswith("!")] for line in lines] == [
        "4",
        "2",
        "2",
        "1",
    ]


def test_dead_letters_and_their_requeue_are_in_the_log(caplog, outbox, relay):
    caplog.set_level(logging.INFO, "django_idempotency")
    outbox(MAX_ATTEMPTS=1)
    publish_all("bad")
    one = relay()
    one.publisher.refuses = lambda event: "no"
    one.step()
    decide(Act.REQUEUE, dead_letters())
    logged = [(record.event, record.levelname) for record in caplog.records]
    assert logged == [("outbox_dead_lettered", "ERROR"), ("outbox_requeued", "INFO")]


def test_a_requeue_that_is_rolled_back_is_not_signalled(dead):
    with heard(signals.outbox_requeued) as sent:
        with transaction.atomic():
            assert decide(Act.REQUEUE, dead_letters())[0] == 3
            transaction.set_rollback(True)
        assert sent == []
        decide(Act.REQUEUE, dead_letters())
    assert [(each["sender"], each["count"]) for each in sent] == [("default", 3)]
