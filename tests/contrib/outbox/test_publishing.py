"""Publishing: with its transaction or not at all, under an id, and nothing that no
publisher could send.
"""

from __future__ import annotations

import datetime
import decimal
import uuid

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import TestCase

from django_idempotency.contrib.outbox.conf import OutboxOptions
from django_idempotency.contrib.outbox.models import LANES, OutboxEvent, Status
from django_idempotency.contrib.outbox.publishing import (
    InvalidEvent,
    PublishedOutsideTransaction,
    lane_of,
    publish,
)


def published(topic="charge.created", payload=None, **options):
    with transaction.atomic():
        id = publish(topic, {} if payload is None else payload, **options)
    return OutboxEvent.objects.get(event_id=id)


def test_an_event_is_refused_outside_a_transaction(outbox):
    with pytest.raises(
        PublishedOutsideTransaction, match=r"transaction\.atomic\(using='default'\)"
    ):
        publish("charge.created", {})
    assert not OutboxEvent.objects.exists()


class TestInATestCase(TestCase):
    def test_the_transaction_of_a_test_case_counts(self):
        publish("charge.created", {})
        assert OutboxEvent.objects.count() == 1


def publish_and_roll_back(topic):
    with transaction.atomic():
        publish(topic, {})
        transaction.set_rollback(True)


def test_an_event_goes_with_its_transaction_or_savepoint(outbox):
    publish_and_roll_back("gone")
    with transaction.atomic():
        publish("kept", {})
        publish_and_roll_back("gone")
    assert OutboxEvent.objects.get().topic == "kept"


def test_an_event_has_an_id_of_its_own_and_a_lane_of_its_key(outbox):
    one, two = published(key="order-7"), published(key="order-7")
    assert (one.event_id.version, one.event_id.variant) == (7, uuid.RFC_4122)
    assert one.event_id != two.event_id
    assert one.lane == two.lane == lane_of("order-7", one.event_id)
    assert (one.status, one.attempts, one.publisher) == (Status.PENDING, 0, "default")


def test_keys_and_events_without_one_go_to_all_lanes():
    ids = [uuid.UUID(int=number) for number in range(5000)]
    assert (
        {lane_of("", id) for id in ids}
        == {lane_of(str(id), id) for id in ids}
        == set(range(LANES))
    )


@pytest.mark.parametrize(
    ("payload", "body", "content_type"),
    [
        (b"\xff\x00", b"\xff\x00", "application/octet-stream"),
        (bytearray(b"a"), b"a", "application/octet-stream"),
        ("text", b'"text"', "application/json"),
        ([1, None], b"[1, null]", "application/json"),
        (
            {"on": datetime.date(2026, 1, 2), "of": decimal.Decimal("1.50")},
            None,
            "application/json",
        ),
    ],
)
def test_a_payload_is_bytes_or_json(outbox, payload, body, content_type):
    event = published(payload=payload)
    body = body or b'{"on": "2026-01-02", "of": "1.50"}'
    assert (bytes(event.payload), event.content_type) == (body, content_type)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"topic": ""}, "topic is ''; it must be a string of 1 to 255 characters"),
        ({"topic": "a\0b"}, "control characters"),
        ({"key": "x" * 256}, "key is"),
        ({"payload": float("nan")}, "can't be sent as JSON"),
        ({"payload": b"x" * 101}, "has 101 bytes, but at most 100 are allowed"),
        ({"headers": {"bad name": "x"}}, "'bad name'"),
        ({"headers": {"name": "a\r\nb"}}, "visible ASCII"),
        ({"headers": {"name": "é"}}, "visible ASCII"),
        ({"headers": {"name": " a"}}, "visible ASCII"),
        ({"content_type": "text/é"}, "visible ASCII"),
        ({"headers": {"name": 7}}, "is 7"),
    ],
)
def test_an_event_that_can_not_be_sent_is_refused(outbox, wrong, told):
    outbox(MAX_PAYLOAD=100)
    with pytest.raises(InvalidEvent, match=told):
        published(**wrong)
    assert not OutboxEvent.objects.exists()


def test_an_event_costs_one_statement(outbox, django_assert_num_queries):
    with transaction.atomic(), django_assert_num_queries(1):
        publish("charge.created", {"amount": 1}, key="k", headers={"a": "b"})


@pytest.mark.opentelemetry
def test_the_open_span_goes_along(outbox):
    from opentelemetry.sdk import trace

    tracer = trace.TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("charge") as span:
        event = published(headers={"Tenant": "a"})
    context = span.get_span_context()
    assert event.headers.keys() == {"tenant", "traceparent"}
    assert event.headers["traceparent"].startswith(
        f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    )


def test_a_stated_traceparent_wins(outbox):
    stated = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert published(headers={"Traceparent": stated}).headers == {"traceparent": stated}


def test_routes_decide_by_the_topic(outbox, settings):
    receiver = {"BACKEND": "tests.contrib.outbox.receiver.Receiver"}
    outbox(
        PUBLISHERS={"default": receiver, "mail": receiver}, ROUTES={"mail.*": "mail"}
    )
    assert [published(topic).publisher for topic in ("mail.sent", "mailbox")] == [
        "mail",
        "default",
    ]


def test_options_and_errors_hide_the_secrets_of_a_publisher(outbox):
    broken = {"default": {"OPTIONS": {"url": "amqp://user:hunter2@mq"}}}
    assert "hunter2" not in repr(
        OutboxOptions(publishers={"default": {"BACKEND": "x.Y", **broken["default"]}})
    )
    outbox(PUBLISHERS=broken)
    with pytest.raises(
        ImproperlyConfigured, match="must be a dict of dicts with BACKEND"
    ) as refused:
        published()
    assert "hunter2" not in str(refused.value)
