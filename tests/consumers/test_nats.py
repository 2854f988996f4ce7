"""The JetStream adapter against a real NATS server."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from uuid import uuid4

import pytest
from nats.js.errors import NotFoundError

from django_idempotency.consumers import Backoff, Consumer, RejectMessage
from testproject.models import LedgerEntry
from tests.consumers.brokers import Gate, redeliveries, running
from tests.consumers.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.waiting import eventually

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("transactional_db")]


class Stream:
    """A stream of the test's own, with a subject for messages and one for dead letters."""

    def __init__(self, url):
        self.url, self.name = url, f"test{uuid4().hex}"
        self.subject, self.dead_letters = f"{self.name}.in", f"{self.name}.dead"
        self.do(lambda jetstream: jetstream.add_stream(name=self.name, subjects=[f"{self.name}.*"]))

    def do(self, work):
        import nats

        async def doing():
            client = await nats.connect(self.url)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(doing())

    def publish(self, *ids, body=b"{}", headers=None):
        async def send(jetstream):
            for id in ids:
                named = {"X-Id": id} if id else {}
                await jetstream.publish(self.subject, body, headers={**named, **(headers or {})} or None)

        self.do(send)

    def dead(self):
        async def last(jetstream):
            return await jetstream.get_last_msg(self.name, self.dead_letters)

        try:
            return self.do(last)
        except Exception:
            return None

    def pending(self):
        """How many are not settled; ``None`` while there is no consumer."""

        async def count(jetstream):
            info = await jetstream.consumer_info(self.name, "tests")
            return info.num_pending + info.num_ack_pending

        try:
            return self.do(count)
        except NotFoundError:
            return None


@pytest.fixture
def stream(nats_url):
    stream = Stream(nats_url)
    yield stream
    stream.do(lambda jetstream: jetstream.delete_stream(stream.name))


def jetstream(stream, handler, *, max_attempts=10, **options):
    from django_idempotency.consumers.nats import JetStream

    consumer = Consumer("tests", handler, backoff=Backoff(first=0.1), max_attempts=max_attempts)
    options = {"identify": lambda received: (received.headers or {}).get("X-Id"), **options}
    named = {"stream": stream.name, "dead_letters": stream.dead_letters, **options}
    return JetStream(consumer, stream.url, stream.subject, **named)


def test_each_message_takes_effect_once_however_often_it_comes(stream):
    stream.publish(*(f"m-{number % 40}" for number in range(200)))
    runners = [jetstream(stream, pay, concurrency=2) for _n in range(2)]
    with running(*runners):
        eventually(lambda: stream.pending() == 0, within=60, every=0.3)
    assert effects() == 40
    assert LedgerEntry.objects.values("reference").distinct().count() == 40


def test_a_long_message_is_not_delivered_again(stream):
    gate = Gate(pay)
    first, second = jetstream(stream, gate, ack_wait=1), jetstream(stream, gate, ack_wait=1)
    with running(first, second):
        stream.publish("m")
        assert gate.entered.wait(30)
        renewed = first.extended + second.extended
        eventually(lambda: first.extended + second.extended >= renewed + 8)
        gate.opened.set()
        eventually(lambda: first.counts["Done"] + second.counts["Done"])
    assert gate.runs == 1
    assert sum((first.counts + second.counts).values()) == 1


def test_a_consumer_that_is_there_is_kept_from_redelivering_too(stream):
    """By its own ``ack_wait``, whatever the runner states."""
    from nats.js.api import AckPolicy, ConsumerConfig

    config = ConsumerConfig(
        durable_name="tests", ack_policy=AckPolicy.EXPLICIT, ack_wait=1, filter_subject=stream.subject
    )
    stream.do(lambda jetstream: jetstream.add_consumer(stream.name, config=config))
    gate = Gate(pay)
    runner = jetstream(stream, gate, ack_wait=30)
    with running(runner):
        stream.publish("m")
        assert gate.entered.wait(30)
        eventually(lambda: runner.extended >= 6, within=10)
        gate.opened.set()
        eventually(lambda: runner.counts["Done"])
    assert sum(runner.counts.values()) == 1


def test_a_message_says_that_it_was_delivered_before(stream):
    stream.publish("m")
    assert redeliveries(jetstream(stream, pay)) == [False, True]


def test_a_handler_that_fails_is_tried_again_until_it_succeeds(stream):
    def handle(message, context):
        pay(message, context)
        if context.attempt < 3:
            raise LookupError("not yet")

    runner = jetstream(stream, handle)
    with running(runner):
        stream.publish("m")
        eventually(lambda: runner.counts["Done"])
    assert (runner.counts["Retry"], effects()) == (2, 1)


def test_a_message_that_can_not_be_handled_goes_to_the_dead_letters(stream):
    def refuse(message, context):
        raise RejectMessage("no such account")

    with running(jetstream(stream, refuse)):
        stream.publish("m", body=b'{"a": 1}', headers={"Tenant": "x"})
        dead = eventually(stream.dead, every=0.2)
        eventually(lambda: stream.pending() == 0, every=0.2)
    assert (dead.data, dead.headers["Tenant"]) == (b'{"a": 1}', "x")
    assert dead.headers["idempotency-reason"] == "no such account"


def test_without_a_dead_letter_queue_the_message_is_kept(stream, monkeypatch):
    """Connecting again would not help, and would hold up everything else."""
    monkeypatch.setattr("django_idempotency.consumers.runner.AFTER_ERROR", 0.1)

    def handle(message, context):
        if message.id == "bad":
            raise RejectMessage("no such account")
        return pay(message, context)

    runner = jetstream(stream, handle, dead_letters=f"{stream.name}-elsewhere.dead", ack_wait=5)
    with running(runner):
        stream.publish("bad")
        eventually(lambda: runner.counts["Refused"] >= 2)
        connected = runner.client
        stream.publish("m")
        eventually(lambda: runner.counts["Refused"] >= 4 and effects())
        assert runner.client is connected
    assert stream.pending() == 1


def test_without_a_header_the_sequence_number_is_the_id(stream):
    runner = jetstream(stream, pay, identify=None)
    with running(runner):
        stream.publish(None, None)
        eventually(lambda: runner.counts["Done"] == 2)
    assert sorted(LedgerEntry.objects.values_list("reference", flat=True)) == ["1", "2"]


@pytest.mark.parametrize("headers", [{"Nats-Msg-Id": "pay-1"}, {}])
def test_two_copies_of_a_dead_letter_are_one_message(stream, headers):
    """A process that dies while it moves a message leaves a copy. An operator may send both back."""

    def crash(message, context):
        raise LookupError("broken")

    with running(jetstream(stream, crash, max_attempts=1, identify=None)):
        stream.publish(None, headers=headers)
        dead = eventually(stream.dead, every=0.2)
        eventually(lambda: stream.pending() == 0, every=0.2)
    runner = jetstream(stream, pay, max_attempts=1, identify=None)
    with running(runner):
        stream.publish(None, None, headers=dict(dead.headers))
        eventually(lambda: sum(runner.counts.values()) == 2)
    assert (runner.counts["Done"], runner.counts["AlreadyDone"], effects()) == (1, 1, 1)
    assert LedgerEntry.objects.get().reference == headers.get("Nats-Msg-Id", "1")


def test_dead_letters_of_two_streams_are_two_messages_where_they_meet(stream, nats_url):
    """Two streams have the same sequence numbers."""
    calls = []

    def refuse(message, context):
        raise RejectMessage("no such account")

    with ExitStack() as stack:
        other, meeting = Stream(nats_url), Stream(nats_url)
        for made in (other, meeting):
            stack.callback(made.do, lambda jetstream, name=made.name: jetstream.delete_stream(name))
        refusing = [jetstream(each, refuse, dead_letters=meeting.subject, identify=None) for each in (stream, other)]
        keeping = jetstream(meeting, lambda message, context: calls.append(message.id), identify=None)
        for each in (stream, other):
            each.publish(None)
        with running(*refusing, keeping):
            eventually(lambda: sum(keeping.counts.values()) == 2)
    assert sorted(calls) == sorted([f"{stream.name}/1", f"{other.name}/1"])


def test_messages_outlive_consumers_that_are_killed(stream, start_consumer):
    stream.publish(*(f"m-{number % 100}" for number in range(300)))
    environment = {"TEST_STREAM": stream.name, "NATS_URL": stream.url}
    for _kill in range(2):
        consumers = [start_consumer("tests.consumers.consumed.jetstream", **environment) for _n in range(2)]
        before = effects()
        eventually(lambda before=before: effects() > before or effects() == 100, within=60)
        for consumer in consumers:
            consumer.kill()
            consumer.wait()
    start_consumer("tests.consumers.consumed.jetstream", **environment)
    eventually(lambda: effects() == 100 and stream.pending() == 0, within=90, every=0.3)
    assert LedgerEntry.objects.values("reference").distinct().count() == 100
