"""The JetStream adapter against a real NATS server."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import MappingProxyType
from uuid import uuid4

import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from django_idempotency.contrib.nats import JetStream
from django_idempotency.messages import Backoff, Consumer
from django_idempotency.messages import runner as running_of_consumers
from tests.messages.brokers import Gate, beats_of, running
from tests.messages.handlers import pay
from tests.support.brokers import on_jetstream
from tests.support.callers import all_effects as effects
from tests.support.private_servers import PrivateNATS
from tests.support.runner_contract import (
    CrashContract,
    Dead,
    OutageContract,
    RunnerContract,
    refuse,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("transactional_db")]


class Stream:
    """A stream of the test's own, with a subject for messages and one for dead
    letters.
    """

    def __init__(self, url):
        self.url, self.name = url, f"test{uuid4().hex}"
        self.subject, self.dead_letters = f"{self.name}.in", f"{self.name}.dead"
        self.do(
            lambda jetstream: jetstream.add_stream(
                name=self.name, subjects=[f"{self.name}.*"]
            )
        )

    def do(self, work):
        return on_jetstream(self.url, work)

    def publish(self, *ids, body=b"{}", headers=None):
        async def send(jetstream):
            for id in ids:
                named = {"X-Id": id} if id else {}
                await jetstream.publish(
                    self.subject, body, headers={**named, **(headers or {})} or None
                )

        self.do(send)

    def take_dead(self):
        async def last(jetstream):
            found = await jetstream.get_last_msg(self.name, self.dead_letters)
            await jetstream.delete_msg(self.name, found.seq)
            return found

        try:
            found = self.do(last)
        except NotFoundError:
            return None
        return Dead(found.data, found.headers)

    @property
    def environment(self):
        return {"TEST_STREAM": self.name, "NATS_URL": self.url}

    def runner(self, handler, *, identified=True, **options):
        return jetstream(
            self, handler, **({} if identified else {"identify": None}), **options
        )

    def is_empty(self):
        return self.pending() == 0

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


@pytest.fixture
def broker(stream):
    return stream


class TestRunner(RunnerContract):
    pass


class TestOutages(OutageContract):
    redelivering = MappingProxyType({"ack_wait": 12})


class TestCrashes(CrashContract):
    consumed = "tests.contrib.consumed.jetstream"


# seconds; a busy machine may be late with a heartbeat, of which there are three
REDELIVERED = 9


def jetstream(stream, handler, *, max_attempts=10, **options):
    consumer = Consumer(
        "tests", handler, backoff=Backoff(first=0.1), max_attempts=max_attempts
    )
    options = {
        "identify": lambda received: (received.headers or {}).get("X-Id"),
        **options,
    }
    named = {"stream": stream.name, "dead_letters": stream.dead_letters, **options}
    return JetStream(consumer, stream.url, stream.subject, **named)


def test_a_long_message_is_not_delivered_again(stream, nats_url):
    """A consumer that exists has an ``ack_wait`` of its own, whatever the runner
    states.
    """
    config = ConsumerConfig(
        durable_name="tests",
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=REDELIVERED,
    )
    with ExitStack() as stack:
        other = Stream(nats_url)
        stack.callback(other.do, lambda jetstream: jetstream.delete_stream(other.name))
        config.filter_subject = other.subject
        other.do(lambda jetstream: jetstream.add_consumer(other.name, config=config))
        held = []
        for each, ack_wait in ((stream, REDELIVERED), (other, 600)):
            gate = Gate(pay)
            pair = [jetstream(each, gate, ack_wait=ack_wait) for _n in range(2)]
            held.append((gate, pair, [*map(beats_of, pair)]))
            each.publish("m")
        with running(*(runner for _gate, pair, _beats in held for runner in pair)):
            for gate, _pair, _beats in held:
                assert gate.entered.wait(60)
            late = time.monotonic() + 1.2 * REDELIVERED
            eventually(
                lambda: all(
                    any(beat > late for each in beats for beat in each)
                    for _gate, _pair, beats in held
                )
            )
            for gate, _pair, _beats in held:
                gate.opened.set()
            for _gate, (first, second), _beats in held:
                eventually(
                    lambda a=first, b=second: a.counts["Done"] + b.counts["Done"]
                )
    for gate, (first, second), _beats in held:
        assert gate.runs == 1
        assert (first.counts + second.counts).total() == 1


def test_without_a_dead_letter_queue_the_message_is_kept(stream, monkeypatch):
    """Connecting again would not help, and would hold up everything else."""
    monkeypatch.setattr("django_idempotency.messages.runner.AFTER_ERROR", 0.1)

    def handle(message, context):
        return (
            refuse(message, context) if message.id == "bad" else pay(message, context)
        )

    runner = jetstream(
        stream, handle, dead_letters=f"{stream.name}-elsewhere.dead", ack_wait=5
    )
    with running(runner):
        stream.publish("bad")
        eventually(lambda: runner.counts["Refused"] >= 2)
        connected = runner.client
        stream.publish("m")
        eventually(lambda: runner.counts["Refused"] >= 4 and effects())
        assert runner.client is connected
    eventually(lambda: stream.pending() == 1)


def test_dead_letters_of_two_streams_are_two_messages_where_they_meet(stream, nats_url):
    """Two streams have the same sequence numbers."""
    calls = []

    with ExitStack() as stack:
        other, meeting = Stream(nats_url), Stream(nats_url)
        for made in (other, meeting):
            stack.callback(
                made.do, lambda jetstream, name=made.name: jetstream.delete_stream(name)
            )
        refusing = [
            jetstream(each, refuse, dead_letters=meeting.subject, identify=None)
            for each in (stream, other)
        ]
        keeping = jetstream(
            meeting, lambda message, context: calls.append(message.id), identify=None
        )
        for each in (stream, other):
            each.publish(None)
        with running(*refusing, keeping):
            eventually(lambda: sum(keeping.counts.values()) == 2)
    assert sorted(calls) == sorted([f"{stream.name}/1", f"{other.name}/1"])


@pytest.mark.private_nats
def test_health_tells_that_the_server_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(running_of_consumers, "SILENCE", 1)
    server = PrivateNATS(tmp_path)
    with server.running(), running(runner := jetstream(Stream(server.url), pay)):
        eventually(lambda: runner.is_healthy)
        server.kill()
        eventually(lambda: not runner.is_healthy)
        server.start()
        eventually(lambda: runner.is_healthy)
