"""The publisher that enqueues events as tasks of Django's own framework."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishers.django_tasks import DjangoTasksPublisher
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.outbox.relay import EventRelay
from django_idempotency.messages.publisher import Confirmed, Refused
from tests.contrib.outbox.events import event, sent
from tests.support.callers import all_effects

pytestmark = [pytest.mark.django_tasks, pytest.mark.usefixtures("transactional_db")]
HERE = "tests.messages.tasks_of_django"


def test_an_event_that_is_sent_again_runs_its_task_once():
    one = event(f"{HERE}.paying", b'["r-1"]')
    assert [*sent(DjangoTasksPublisher(), one), *sent(DjangoTasksPublisher(), one)] == [Confirmed(one)] * 2
    assert all_effects() == 1


def test_the_relay_enqueues_a_task(settings):
    publisher = {"BACKEND": "django_idempotency.contrib.outbox.publishers.django_tasks.DjangoTasksPublisher"}
    settings.IDEMPOTENCY = {"OUTBOX": {"PUBLISHERS": {"default": publisher}}}
    with transaction.atomic():
        publish(f"{HERE}.plain", {"reference": "r-1"})
        publish(f"{HERE}.paying", {"reference": "r-2"})
    assert EventRelay("default").run_once() == 2
    assert (all_effects(), OutboxEvent.objects.count()) == (2, 0)


def test_a_task_whose_backend_is_not_there_is_refused():
    lost, other = event(f"{HERE}.plain", b'["r-1"]'), event(f"{HERE}.paying", b'["r-2"]')
    outcomes = sent(DjangoTasksPublisher(backend="gone"), lost, other)
    assert [type(outcome) for outcome in outcomes] == [Refused, Refused]
    assert "gone" in outcomes[0].reason


@pytest.mark.parametrize(
    ("topic", "payload"), [(f"{HERE}.nothing", b"[]"), ("json.loads", b"[]"), (f"{HERE}.plain", b"1")]
)
def test_an_event_that_names_no_task_is_refused_for_good(topic, payload):
    one = event(topic, payload)
    (outcome,) = sent(DjangoTasksPublisher(), one)
    assert isinstance(outcome, Refused)
    assert outcome.permanent
