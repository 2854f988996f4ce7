"""Functions in this process, the inbox, and Celery, as where events go."""

from __future__ import annotations

import time

import pytest
from django.contrib.auth import get_user_model
from django.db import transaction

from django_idempotency.consumers import RejectMessage
from django_idempotency.outbox import maintenance
from django_idempotency.outbox.models import OutboxEvent, Status
from django_idempotency.outbox.publishers.base import Confirmed, NotSent, Refused
from django_idempotency.outbox.publishers.local import InboxPublisher, LocalPublisher
from django_idempotency.outbox.publishing import publish
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.outbox.events import TRACE, event, sent
from tests.support.callers import PAYER


def receive(message, context):
    """A receipt for each charge: an effect in the consumer's database."""
    if message.source == "bad":
        raise RejectMessage("no such charge")
    user = get_user_model().objects.get(username=PAYER)
    LedgerEntry.objects.record(kind="charge", user=user, amount=1, currency="eur", reference=message.id)


@pytest.fixture
def inbox(payer, outbox):
    backend = "django_idempotency.outbox.publishers.local.InboxPublisher"
    outbox(PUBLISHERS={"default": {"BACKEND": backend, "OPTIONS": {"handler": f"{__name__}.receive"}}})


def test_a_function_confirms_by_returning():
    good, bad = event("good"), event("bad")

    def handle(event):
        if event is bad:
            raise ValueError("no")

    assert sent(LocalPublisher(handle), good, bad) == [Confirmed(good), Refused(bad, "ValueError: no")]


@pytest.mark.parametrize("publisher", [LocalPublisher, InboxPublisher])
def test_a_coroutine_function_confirms_nothing(publisher, transactional_db):
    """Nobody awaits it, so it does nothing."""

    async def handle(*_given):
        return None

    options = {"policy": Policy(mode="lease")} if publisher is InboxPublisher else {}
    (outcome,) = sent(publisher(handle, **options), event("a"))
    assert isinstance(outcome, Refused)
    assert "sync, or use aconsume()" in outcome.reason


def test_a_slow_function_leaves_the_rest_for_later():
    first, second = event("a"), event("b")
    publisher = LocalPublisher(lambda _event: time.sleep(0.02))
    assert sent(publisher, first, second, timeout=0.01) == [Confirmed(first), NotSent(second)]


def test_an_event_that_is_sent_twice_has_one_effect_in_the_inbox(inbox):
    one, publisher = event("charge.created"), InboxPublisher(receive)
    for _ in range(2):
        assert sent(publisher, one) == [Confirmed(one)]
    assert LedgerEntry.objects.filter(reference=str(one.id)).count() == 1


def test_the_inbox_sees_the_events_headers(inbox):
    seen = []
    sent(InboxPublisher(lambda message, context: seen.append(message)), event("charge.created"))
    assert seen[0].traceparent == TRACE


def test_what_the_handler_rejects_is_given_up(inbox, relay):
    with transaction.atomic():
        publish("bad", {})
    relay().run_once()
    dead = OutboxEvent.objects.get()
    assert (dead.status, dead.attempts) == (Status.DEAD, 1)
    assert "no such charge" in dead.error


@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize("most", [1, 3])
def test_a_requeued_event_is_handled_after_the_attempts_were_used_up(outbox, relay, mode, most):
    backend = "django_idempotency.outbox.publishers.local.InboxPublisher"
    options = {"handler": f"{__name__}.receive", "max_attempts": most, "policy": Policy(mode=mode)}
    outbox(PUBLISHERS={"default": {"BACKEND": backend, "OPTIONS": options}}, FIRST_DELAY=0.001, LONGEST_DELAY=0.001)
    with transaction.atomic():
        id = publish("charge.created", {})
    one = relay()
    while OutboxEvent.objects.get().status != Status.DEAD:
        one.step()
    assert f"attempt {most} of {most} failed: DoesNotExist" in OutboxEvent.objects.get().error
    get_user_model().objects.create_user(PAYER)
    assert maintenance.requeue() == 1
    assert one.run_once() == 1
    assert LedgerEntry.objects.filter(reference=str(id)).count() == 1


def test_from_the_transaction_to_the_effect_once(inbox, relay):
    with transaction.atomic():
        id = publish("charge.created", {})
    assert relay().run_once() == 1
    assert LedgerEntry.objects.filter(reference=str(id)).count() == 1


@pytest.mark.rabbitmq
def test_a_task_has_the_events_id_arguments_and_headers(rabbitmq_url):
    import uuid

    import kombu
    from celery import Celery

    from django_idempotency.outbox.publishers.celery import CeleryPublisher

    queue = f"tasks-{uuid.uuid4().hex}"
    app = Celery("shop", broker=rabbitmq_url, set_as_current=False)
    named, listed, wrong = event("shop.charge"), event("shop.charge", b"[1, 2]"), event("shop.charge", b'"text"')
    outcomes = sent(CeleryPublisher(app, queue=queue), named, listed, wrong)
    assert outcomes[:2] == [Confirmed(named), Confirmed(listed)]
    assert isinstance(outcomes[2], Refused)
    assert outcomes[2].permanent
    with kombu.Connection(rabbitmq_url) as connection:
        got = connection.channel()
        messages = [kombu.Connection, *(got.basic_get(queue, no_ack=True) for _ in range(2))][1:]
        got.queue_delete(queue)
    headers = [message.properties["application_headers"] for message in messages]
    assert [header["id"] for header in headers] == [str(named.id), str(listed.id)]
    assert headers[0]["traceparent"] == TRACE
    assert headers[0]["kwargsrepr"] == "{'amount': 1}"
    assert headers[1]["argsrepr"] in ("[1, 2]", "(1, 2)")
    app.close()


@pytest.mark.celery
def test_a_task_that_no_route_takes_is_refused():
    """``task_create_missing_queues = False``: a queue that is misspelt is an error, and costs the others nothing."""
    from celery import Celery

    from django_idempotency.outbox.publishers.celery import CeleryPublisher

    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_create_missing_queues = False
    app.conf.task_routes = {"mail.*": {"queue": "emial"}}
    lost, other = event("mail.send"), event("shop.charge")
    refused, confirmed = sent(CeleryPublisher(app), lost, other)
    assert isinstance(refused, Refused)
    assert "emial" in refused.reason
    assert confirmed == Confirmed(other)
    app.close()


@pytest.mark.rabbitmq
def test_a_header_with_a_name_that_celery_uses_is_not_sent():
    from celery import Celery

    from django_idempotency.outbox.publishers.celery import CeleryPublisher

    app = Celery("shop", broker="memory://", set_as_current=False)
    one = event("shop.charge", headers={"id": "tenant-7", "task": "other", "retries": "3", "chord": "x", "tenant": "7"})
    with app.connection() as connection:
        queue = connection.SimpleQueue("tasks")
        assert sent(CeleryPublisher(app, queue="tasks"), one) == [Confirmed(one)]
        message = queue.get(timeout=5)
        message.ack()
        queue.close()
    headers = message.headers
    assert (headers["id"], headers["task"], headers["retries"]) == (str(one.id), "shop.charge", 0)
    assert (headers["tenant"], "chord" in headers) == ("7", False)
    app.close()
