"""Functions in this process, the inbox, and Celery, as where events go."""

from __future__ import annotations

import time
import uuid
from functools import partial

import pytest
from django.contrib.auth import get_user_model

from django_idempotency.contrib.outbox.decisions import Act, decide
from django_idempotency.contrib.outbox.maintenance import dead_letters
from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.contrib.outbox.publishers.local import InboxPublisher, LocalPublisher
from django_idempotency.messages import RejectMessage
from django_idempotency.messages.publisher import Confirmed, NotSent, Refused
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.contrib.outbox.events import TRACE, event, publish_all, sent
from tests.support.callers import PAYER


def receive(message, context):
    """A receipt for each charge: an effect in the consumer's database."""
    if message.source == "bad":
        raise RejectMessage("no such charge")
    user = get_user_model().objects.get(username=PAYER)
    LedgerEntry.objects.record(kind="charge", user=user, amount=1, currency="eur", reference=message.id)


@pytest.fixture
def inbox(payer, outbox):
    backend = "django_idempotency.contrib.outbox.publishers.local.InboxPublisher"
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
    assert seen[0].headers["traceparent"] == TRACE


def test_an_event_that_the_handler_rejects_is_given_up(inbox, relay):
    publish_all("bad")
    relay().run_once()
    dead = OutboxEvent.objects.get()
    assert (dead.status, dead.attempts) == (Status.DEAD, 1)
    assert "no such charge" in dead.error


@pytest.mark.parametrize(("mode", "most"), [("atomic", 3), ("lease", 1)])
def test_a_requeued_event_is_handled_after_the_attempts_were_used_up(outbox, relay, mode, most):
    backend = "django_idempotency.contrib.outbox.publishers.local.InboxPublisher"
    options = {"handler": f"{__name__}.receive", "max_attempts": most, "policy": Policy(mode=mode)}
    outbox(PUBLISHERS={"default": {"BACKEND": backend, "OPTIONS": options}}, FIRST_DELAY=0.001, LONGEST_DELAY=0.001)
    (id,) = publish_all("charge.created")
    one = relay()
    while OutboxEvent.objects.get().status != Status.DEAD:
        one.step()
    assert f"attempt {most} of {most} failed: DoesNotExist" in OutboxEvent.objects.get().error
    get_user_model().objects.create_user(PAYER)
    assert decide(Act.REQUEUE, dead_letters()).done == 1
    assert one.run_once() == 1
    assert LedgerEntry.objects.filter(reference=str(id)).count() == 1


def test_from_the_transaction_to_the_effect_once(inbox, relay):
    (id,) = publish_all("charge.created")
    assert relay().run_once() == 1
    assert LedgerEntry.objects.filter(reference=str(id)).count() == 1


@pytest.fixture
def celery():
    """``celery(queue="q")`` makes a publisher whose application has a broker in this process."""
    from celery import Celery

    from django_idempotency.contrib.outbox.publishers.celery import CeleryPublisher

    with Celery("shop", broker="memory://", set_as_current=False) as app:
        yield partial(CeleryPublisher, app)


@pytest.mark.rabbitmq
def test_a_task_has_the_events_id_arguments_and_headers(celery, rabbitmq_url):
    import kombu

    publisher = celery(queue=f"tasks-{uuid.uuid4().hex}")
    publisher.app.conf.broker_url = rabbitmq_url
    named, listed, wrong = event("shop.charge"), event("shop.charge", b"[1, 2]"), event("shop.charge", b'"text"')
    outcomes = sent(publisher, named, listed, wrong)
    assert outcomes[:2] == [Confirmed(named), Confirmed(listed)]
    assert isinstance(outcomes[2], Refused)
    assert outcomes[2].permanent
    with kombu.Connection(rabbitmq_url) as connection:
        channel, queue = connection.channel(), publisher.options["queue"]
        headers = [channel.basic_get(queue, no_ack=True).properties["application_headers"] for _ in range(2)]
        channel.queue_delete(queue)
    assert [header["id"] for header in headers] == [str(named.id), str(listed.id)]
    assert headers[0]["traceparent"] == TRACE
    assert headers[0]["kwargsrepr"] == "{'amount': 1}"
    assert headers[1]["argsrepr"] in ("[1, 2]", "(1, 2)")


@pytest.mark.celery
def test_an_event_that_celery_does_not_take_is_refused_and_costs_the_others_nothing(celery):
    """``task_create_missing_queues = False``: a queue that is misspelt is an error."""
    publisher = celery()
    publisher.app.conf.task_create_missing_queues = False
    publisher.app.conf.task_routes = {"mail.*": {"queue": "emial"}}
    lost, deep, other = event("mail.send"), event("shop.charge", b"[" * 200_000), event("shop.charge")
    misspelt, too_deep, confirmed = sent(publisher, lost, deep, other)
    assert isinstance(misspelt, Refused)
    assert "emial" in misspelt.reason
    assert isinstance(too_deep, Refused)
    assert "RecursionError" in too_deep.reason
    assert confirmed == Confirmed(other)


@pytest.mark.celery
def test_a_header_with_a_name_that_celery_uses_is_not_sent(celery):
    publisher = celery(queue="tasks")
    one = event("shop.charge", headers={"id": "tenant-7", "task": "other", "retries": "3", "chord": "x", "tenant": "7"})
    with publisher.app.connection() as connection:
        queue = connection.SimpleQueue("tasks")
        assert sent(publisher, one) == [Confirmed(one)]
        message = queue.get(timeout=5)
        message.ack()
        queue.close()
    headers = message.headers
    assert (headers["id"], headers["task"], headers["retries"]) == (str(one.id), "shop.charge", 0)
    assert (headers["tenant"], "chord" in headers) == ("7", False)
