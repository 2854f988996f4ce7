"""The RabbitMQ adapter against a real RabbitMQ."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import SimpleNamespace
from urllib.parse import urlsplit
from uuid import uuid4

import kombu
import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.contrib.rabbitmq import RabbitMQ
from django_idempotency.messages import Backoff, Consumer, RejectMessage
from testproject.models import LedgerEntry
from tests.messages.brokers import Gate, running
from tests.messages.handlers import pay, pay_from
from tests.support.callers import all_effects as effects
from tests.support.private_servers import PrivateRabbitMQ
from tests.support.proxy import running_proxy
from tests.support.runner_contract import CrashContract, Dead, RunnerContract, refuse
from tests.support.waiting import eventually

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("transactional_db")]


class Queue:
    """A queue of the test's own, its dead letters, and a way to publish to it, as the
    contract of runners wants it.

    Its messages without an id of their own are one.
    """

    def __init__(self, url):
        self.url, self.name = url, f"idempotency-test-{uuid4().hex}"
        self.connection = kombu.Connection(url, connect_timeout=60)
        self.channel = self.connection.channel()
        kombu.Queue(self.name)(self.channel).declare()

    @property
    def environment(self):
        return {"TEST_QUEUE": self.name}

    def runner(self, handler, *, identified=True, **options):
        return rabbitmq(self, handler, **options)

    def publish(self, *ids, body=b"{}", **options):
        for id in ids:
            kombu.Producer(self.channel).publish(
                body, routing_key=self.name,
                content_type="application/json", content_encoding="binary",
                message_id=id or "only", delivery_mode=2, **options,
            )  # fmt: skip

    def declare(self, suffix, **arguments):
        kombu.Queue(f"{self.name}{suffix}", queue_arguments=arguments)(
            self.channel
        ).declare()

    def count(self, suffix=""):
        return (
            kombu.Queue(f"{self.name}{suffix}")(self.channel)
            .queue_declare()
            .message_count
        )

    def dead(self):
        kombu.Queue(f"{self.name}.dead")(self.channel).declare()
        return kombu.Queue(f"{self.name}.dead")(self.channel).get(no_ack=True)

    def take_dead(self):
        dead = self.dead()
        return dead and Dead(dead.body, dead.headers)

    def is_empty(self):
        return self.count() == 0

    def close(self):
        for suffix in ("", ".dead", *(f".later.{2**n}" for n in range(9))):
            self.channel.queue_delete(f"{self.name}{suffix}")
        self.connection.release()


@pytest.fixture
def queue(rabbitmq_url):
    queue = Queue(rabbitmq_url)
    yield queue
    queue.close()


@pytest.fixture
def broker(queue):
    return queue


class TestRunner(RunnerContract):
    told_of_retries = [False] * 3  # they are copies


class TestCrashes(CrashContract):
    consumed = "tests.contrib.consumed.rabbitmq"


def rabbitmq(queue, handler, *, backoff=None, max_attempts=10, **options):
    consumer = Consumer(
        "tests",
        handler,
        backoff=backoff or Backoff(first=0.1),
        max_attempts=max_attempts,
    )
    return RabbitMQ(consumer, queue.url, queue.name, **options)


@pytest.mark.parametrize(
    "sent",
    [
        {"compression": "gzip"},
        {"headers": {"compression": "none"}},
        {"headers": {"compression": "gzip"}},
    ],
    ids=["compressed", "says none", "says gzip"],
)
def test_a_message_that_is_compressed_or_only_says_so_is_redelivered_as_it_was(
    queue, sent
):
    """The header is kombu's own, but other publishers may give the name another
    meaning.
    """
    bodies = []

    def handle(message, context):
        bodies.append(message.body)
        if context.attempt < 2:
            raise LookupError("not yet")
        raise RejectMessage("no such account")

    runner = rabbitmq(queue, handle)
    with running(runner):
        queue.publish("m", body=b'{"amount": 5}', **sent)
        eventually(lambda: runner.counts["Refused"])
    assert bodies == [b'{"amount": 5}'] * 2
    # of what only says so, kombu could not read the dead letter
    if "compression" in sent:
        assert queue.dead().body == b'{"amount": 5}'


def test_a_dead_letter_keeps_its_properties(queue):
    with running(rabbitmq(queue, refuse)):
        queue.publish("m", correlation_id="c", priority=3)
        dead = eventually(queue.dead)
    assert [
        dead.properties[name] for name in ("message_id", "correlation_id", "priority")
    ] == ["m", "c", 3]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("suffix", "arguments", "differs"),
    [
        (".dead", {"x-message-ttl": 60_000}, "x-message-ttl"),
        (".dead", {"x-queue-type": "quorum"}, "x-queue-type"),
        (".later.1", {"x-message-ttl": 1000}, "x-expires"),
    ],
)
def test_a_queue_with_other_arguments_ends_the_runner(
    queue, suffix, arguments, differs
):
    def crash(message, context):
        raise LookupError("?")

    queue.declare(suffix, **arguments)
    queue.publish("m")
    with pytest.raises(
        ImproperlyConfigured,
        match=rf"{queue.name}{suffix}' can't be declared.*inequivalent arg '{differs}'",
    ):
        rabbitmq(queue, crash).run()
    eventually(lambda: queue.count() == 1)


@pytest.mark.timeout(240)
def test_a_queue_that_may_not_be_declared_ends_the_runner(queue):
    runner = rabbitmq(queue, pay, dead_letters="amq.reserved")
    with pytest.raises(
        ImproperlyConfigured, match=r"'amq.reserved' can't be declared.* ACCESS_REFUSED"
    ):
        runner.run()


def test_a_queue_that_is_there_is_consumed_as_it_is(queue):
    queue.channel.queue_delete(queue.name)
    queue.declare("", **{"x-queue-type": "quorum"})
    queue.publish("m")
    runner = rabbitmq(queue, pay)
    with running(runner):
        eventually(lambda: runner.counts["Done"])
    assert effects() == 1


def test_a_short_delay_does_not_wait_behind_a_longer_one(queue):
    delays = iter([256, 0.1])
    runner = rabbitmq(queue, pay_from(2), backoff=lambda _attempt: next(delays))
    with running(runner):
        queue.publish("long")
        eventually(lambda: runner.counts["Retry"] == 1)
        queue.publish("short")
        eventually(lambda: runner.counts["Done"])
    assert LedgerEntry.objects.get().reference == "short"


def test_a_message_handled_while_the_broker_is_down_takes_effect_once(queue):
    address = urlsplit(queue.url)
    with running_proxy(
        {"HOST": address.hostname, "PORT": address.port or 5672}
    ) as proxy:
        login = address.netloc.rpartition("@")[0]
        gate = Gate(pay)
        runner = rabbitmq(queue, gate)
        runner.url = address._replace(netloc=f"{login}@127.0.0.1:{proxy.port}").geturl()
        with running(runner):
            queue.publish("m")
            assert gate.entered.wait(60)
            proxy.go_away()
            gate.opened.set()
            eventually(effects)
            proxy.come_back()
            eventually(lambda: runner.counts["AlreadyDone"], within=120)
    assert (gate.runs, effects(), queue.count()) == (1, 1, 0)


def test_a_connection_without_room_for_messages_stays_open(queue):
    """RabbitMQ closes a connection that sends no heartbeat for twice the time that was
    agreed on.
    """
    gate = Gate(pay)
    runner = rabbitmq(queue, gate, ahead=1)
    # a busy machine may be late with some of them
    runner.url, runner.heartbeat = f"{queue.url}?heartbeat=3", 0.2
    with running(runner):
        queue.publish("m")
        assert gate.entered.wait(60)
        first = runner.connection
        assert first.get_heartbeat_interval() == 3
        threading.Event().wait(10)
        gate.opened.set()
        queue.publish("n")
        eventually(lambda: runner.counts["Done"] == 2)
        assert runner.connection is first


@pytest.fixture
def private_queue(tmp_path):
    """A queue on a node of its own, and the node."""
    node = PrivateRabbitMQ(tmp_path)
    node.start()
    queue = Queue(node.url)
    yield queue, node
    queue.connection.collect()
    node.kill()


@pytest.mark.slow
@pytest.mark.private_rabbitmq
@pytest.mark.timeout(600)
def test_runners_survive_a_memory_alarm_of_the_broker(private_queue):
    """RabbitMQ takes no delayed message and no dead letter then. The consumer keeps
    them, and goes on with others.
    """
    queue, node = private_queue

    def handle(message, context):
        pay(message, context)
        if message.id == "rejected":
            raise RejectMessage("no such account")
        if message.id == "delayed" and context.attempt < 3:
            raise LookupError("not yet")

    runner, stopped = rabbitmq(queue, handle, ahead=3), rabbitmq(queue, handle)
    queue.publish("delayed", "rejected", *"abcde")
    node.control("set_vm_memory_high_watermark", "0.000001")
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 6)
        with running(stopped):
            pass
        node.control("set_vm_memory_high_watermark", "0.6")
        eventually(lambda: queue.count(".dead"))
    assert (effects(), queue.dead().properties["message_id"]) == (6, "rejected")


@pytest.mark.timeout(240)
def test_a_runner_stops_while_the_broker_is_unavailable():
    runner = rabbitmq(
        SimpleNamespace(url="amqp://guest:guest@127.0.0.1:9//", name="none"), pay
    )
    thread = threading.Thread(target=runner.run)
    thread.start()
    threading.Event().wait(1)
    runner.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_each_host_of_a_list_is_tried(queue):
    away = [f"amqp://guest:guest@127.0.0.1:{port}//" for port in (9, 10)]
    runner = rabbitmq(queue, pay)
    runner.url = ";".join([*away, queue.url])
    eventually(lambda: is_open(runner))
    assert runner.connection.connected
    runner.close()


def is_open(runner):
    """Not yet if a busy broker took longer than the runner waits."""
    with suppress(*runner.broken):
        runner.open()
        return True
    return False


def test_a_message_received_before_a_reconnection_is_redelivered(queue):
    """What is still in hand of the broken connection can be acknowledged no more."""
    runner = rabbitmq(queue, pay)
    eventually(lambda: is_open(runner))
    queue.publish("m-1")
    runner.connection.drain_events(timeout=60)
    assert not runner.message(runner._received[0]).redelivered
    runner.close()
    eventually(lambda: is_open(runner))
    (received,) = runner.receive(1, 60)
    assert runner.message(received).redelivered
    runner.ack([received])
    runner.close()
    assert eventually(lambda: queue.count() == 0)


def test_the_rabbitmq_consumer_command_stops_on_sigterm(start_consumer):
    process = start_consumer(
        "tests.contrib.consumed.rabbitmq", TEST_QUEUE=f"idempotency-test-{uuid4().hex}"
    )
    assert b"Consuming with" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert process.stdout.read() == b"Stopped: no messages\n"
