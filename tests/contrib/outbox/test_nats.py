"""The publisher for NATS JetStream, against the real one."""

from __future__ import annotations

import uuid

import pytest

from django_idempotency.contrib.nats import NATSPublisher
from django_idempotency.messages.publisher import (
    Confirmed,
    PublisherUnavailable,
    Refused,
)
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.brokers import on_jetstream
from tests.support.private_servers import free_port

pytestmark = pytest.mark.nats


class Stream:
    """A stream of the test's own; what its subjects start with, and what is in it."""

    def __init__(self, url):
        self.url = url
        self.name = f"outbox_{uuid.uuid4().hex}"
        self.prefix = f"{self.name}."

    def do(self, act):
        return on_jetstream(self.url, act)

    def messages(self):
        async def read(context):
            count = (await context.stream_info(self.name)).state.messages
            return [
                await context.get_msg(self.name, seq=number)
                for number in range(1, count + 1)
            ]

        return self.do(read)


@pytest.fixture
def stream(nats_url):
    made = Stream(nats_url)
    made.do(
        lambda context: context.add_stream(name=made.name, subjects=[f"{made.prefix}>"])
    )
    yield made
    made.do(lambda context: context.delete_stream(made.name))


def test_events_of_a_key_are_sent_one_after_the_other_in_one_call(nats_url, stream):
    events = [event("charge", key=key) for key in "abaa"]
    assert sent(NATSPublisher(nats_url, prefix=stream.prefix), *events) == [
        *map(Confirmed, events)
    ]


def test_a_message_has_the_events_id_key_and_headers(nats_url, stream):
    one = event("charge.created", key="order-7")
    assert sent(NATSPublisher(nats_url, prefix=stream.prefix), one) == [Confirmed(one)]
    (message,) = stream.messages()
    assert (message.subject, message.data) == (
        f"{stream.prefix}charge.created",
        one.payload,
    )
    assert message.headers == {
        "traceparent": TRACE,
        "Nats-Msg-Id": str(one.id),
        "Content-Type": "application/json",
        "Idempotency-Outbox-Key": "order-7",
    }


def test_an_event_without_a_stream_is_refused_among_others(nats_url, stream):
    good, lost = event(f"{stream.prefix}a"), event(f"nobody-{uuid.uuid4().hex}")
    assert sent(NATSPublisher(nats_url), good, lost) == [
        Confirmed(good),
        Refused(lost, "no stream accepts its subject"),
    ]


def test_an_event_too_large_for_the_broker_is_refused_for_good(nats_url, stream):
    good, large = event("a"), event("a", b"x" * (2 * 1024 * 1024))
    confirmed, refused = sent(
        NATSPublisher(nats_url, prefix=stream.prefix), large, good
    )
    assert (confirmed, type(refused), refused.event, refused.permanent) == (
        Confirmed(good),
        Refused,
        large,
        True,
    )


def test_a_server_that_is_down_is_said_to_be():
    with pytest.raises(PublisherUnavailable):
        NATSPublisher(f"nats://127.0.0.1:{free_port()}").connect()
