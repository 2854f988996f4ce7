"""Functions in this process, and by way of them the inbox and Celery, as where events
go.
"""

from __future__ import annotations

import time

import pytest
from django.contrib.auth import get_user_model

from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.contrib.outbox.publishers.local import LocalPublisher
from django_idempotency.messages import Message, RejectMessage, consume
from django_idempotency.messages.publisher import (
    Confirmed,
    PublisherUnavailable,
    Refused,
)
from testproject.models import LedgerEntry
from tests.contrib.outbox.events import TRACE, event, publish_all, sent
from tests.support.callers import PAYER
from tests.support.pages import DOCS, FENCE
from tests.support.private_servers import free_port


def write_receipt(message, context):
    """A receipt for each charge: an effect in the consumer's database."""
    if message.source == "bad":
        raise RejectMessage("no such charge")
    if message.source == "early":
        raise LookupError("not yet")
    assert message.headers.get("traceparent") in (TRACE, None)
    user = get_user_model().objects.get(username=PAYER)
    LedgerEntry.objects.record(
        kind="charge", user=user, amount=1, currency="eur", reference=message.id
    )


def receive(event):
    return consume(
        Message(event.topic, str(event.id), event.payload, event.headers), write_receipt
    )


def test_a_function_confirms_by_returning():
    good, bad = event("good"), event("bad")

    def handle(event):
        if event is bad:
            raise ValueError("no")

    assert sent(LocalPublisher(handle), good, bad) == [
        Confirmed(good),
        Refused(bad, "ValueError: no"),
    ]


def test_a_coroutine_function_confirms_nothing():
    """Nobody awaits it, so it does nothing."""

    async def handle(event):
        return None

    (outcome,) = sent(LocalPublisher(handle), event("a"))
    assert "sync, or use aconsume()" in outcome.reason


def test_a_slow_function_leaves_the_rest_for_later():
    first, second = event("a"), event("b")
    publisher = LocalPublisher(lambda _event: time.sleep(0.02))
    assert sent(publisher, first, second, timeout=0.01) == [Confirmed(first)]


@pytest.mark.usefixtures("transactional_db")
def test_an_event_whose_consumer_fails_is_refused_and_a_rejected_one_is_given_up():
    early, bad = event("early"), event("bad")
    later, never = sent(LocalPublisher(receive), early, bad)
    assert (later.permanent, never.permanent) == (False, True)
    assert ("not yet" in later.reason, "no such charge" in never.reason) == (True, True)


def test_from_the_transaction_to_the_effect_once(payer, outbox, relay):
    backend = "django_idempotency.contrib.outbox.publishers.local.LocalPublisher"
    outbox(
        PUBLISHERS={
            "default": {
                "BACKEND": backend,
                "OPTIONS": {"handler": f"{__name__}.receive"},
            }
        }
    )
    id, _bad = publish_all("charge.created", "bad")
    assert relay().run_once() == 1
    assert LedgerEntry.objects.filter(reference=str(id)).count() == 1
    assert OutboxEvent.objects.get().status == Status.DEAD


@pytest.mark.celery
def test_the_documented_function_sends_a_task_with_the_events_id():
    from celery import Celery

    (example,) = (
        code
        for code in FENCE.findall((DOCS / "publishers.md").read_text())
        if "send_task" in "".join(code)
    )
    names, one = {}, event("shop.charge")
    exec("".join(example).removeprefix("python"), names)
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        names["current_app"] = app
        # all apps of a process share the memory, and other tests send tasks, too
        app.conf.task_default_queue = "shop"
        assert sent(LocalPublisher(names["send_task"]), one) == [Confirmed(one)]
        with app.connection() as connection:
            message = connection.SimpleQueue("shop").get(timeout=60)
            message.ack()
    with Celery(
        "shop", broker=f"amqp://127.0.0.1:{free_port()}//", set_as_current=False
    ) as app:
        names["current_app"] = app
        app.conf.task_publish_retry = False
        with pytest.raises(PublisherUnavailable):
            sent(LocalPublisher(names["send_task"]), one)
    assert (message.headers["id"], message.headers["task"]) == (
        str(one.id),
        "shop.charge",
    )
