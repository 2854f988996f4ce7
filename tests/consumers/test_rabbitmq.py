"""The RabbitMQ adapter against a real RabbitMQ."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from urllib.parse import urlsplit
from uuid import uuid4

import kombu
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from django_idempotency.consumers import Backoff, Consumer, RejectMessage
from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry
from tests.consumers.brokers import Gate, running
from tests.consumers.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.proxy import running_proxy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("transactional_db")]


class Queue:
    """A queue of the test's own, its dead letters, and a way to publish to it."""

    def __init__(self, url):
        self.url, self.name = url, f"idempotency-test-{uuid4().hex}"
        self.connection = kombu.Connection(url)
        self.channel = self.connection.channel()
        kombu.Queue(self.name)(self.channel).declare()

    def publish(self, id, body=b"{}", **options):
        kombu.Producer(self.channel).publish(
            body, routing_key=self.name, content_type="application/json", content_encoding="binary",
            message_id=id, delivery_mode=2, **options,
        )  # fmt: skip

    def declare(self, suffix, **arguments):
        kombu.Queue(f"{self.name}{suffix}", queue_arguments=arguments)(self.channel).declare()

    def count(self, suffix=""):
        return kombu.Queue(f"{self.name}{suffix}")(self.channel).queue_declare().message_count

    def dead(self):
        kombu.Queue(f"{self.name}.dead")(self.channel).declare()
        return kombu.Queue(f"{self.name}.dead")(self.channel).get(no_ack=True)

    def close(self):
        for suffix in ("", ".dead", *(f".later.{2**n}" for n in range(9))):
            self.channel.queue_delete(f"{self.name}{suffix}")
        self.connection.release()


@pytest.fixture
def queue(rabbitmq_url):
    queue = Queue(rabbitmq_url)
    yield queue
    queue.close()


def rabbitmq(queue, handler, *, backoff=None, max_attempts=10, **options):
    from django_idempotency.consumers.rabbitmq import RabbitMQ

    consumer = Consumer("tests", handler, backoff=backoff or Backoff(first=0.1), max_attempts=max_attempts)
    return RabbitMQ(consumer, queue.url, queue.name, **options)


def test_each_message_takes_effect_once_however_often_it_comes(queue):
    for number in range(200):
        queue.publish(f"m-{number % 40}")
    runners = [rabbitmq(queue, pay, concurrency=2) for _n in range(2)]
    with running(*runners):
        eventually(lambda: sum(sum(runner.counts.values()) for runner in runners) >= 200, within=60)
    assert effects() == 40
    assert queue.count() == 0
    assert sum((runner.counts["Done"]) for runner in runners) == 40


def test_a_message_that_is_handled_elsewhere_comes_later(queue):
    gate = Gate(pay)
    first, second = rabbitmq(queue, gate, ahead=1), rabbitmq(queue, pay)
    with running(first):
        queue.publish("m")
        assert gate.entered.wait(30)
        queue.publish("m")
        with running(second):
            eventually(lambda: second.counts["InFlightElsewhere"])
            gate.opened.set()
            eventually(lambda: first.counts["AlreadyDone"] + second.counts["AlreadyDone"])
    assert (gate.runs, effects()) == (1, 1)


def test_a_compressed_message_is_compressed_when_it_comes_again(queue):
    bodies = []

    def handle(message, context):
        bodies.append(message.body)
        if context.attempt < 2:
            raise LookupError("not yet")
        raise RejectMessage("no such account")

    runner = rabbitmq(queue, handle)
    with running(runner):
        queue.publish("m", b'{"amount": 5}', compression="gzip")
        eventually(lambda: runner.counts["Refused"])
    assert bodies == [b'{"amount": 5}'] * 2
    dead = queue.dead()
    assert (dead.errors, dead.body) == ([], b'{"amount": 5}')


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_message_that_only_says_that_it_is_compressed_ends_no_runner(queue, compression):
    """The header is kombu's own, but other publishers may give the name another meaning."""
    bodies = []

    def handle(message, context):
        bodies.append(message.body)
        if context.attempt < 2:
            raise LookupError("not yet")

    runner = rabbitmq(queue, handle)
    with running(runner):
        queue.publish("m", b'{"amount": 5}', headers={"compression": compression})
        eventually(lambda: runner.counts["Done"])
    assert bodies == [b'{"amount": 5}'] * 2


def test_a_handler_that_fails_is_tried_again_until_it_succeeds(queue):
    attempts = []

    def handle(message, context):
        pay(message, context)
        attempts.append(context.attempt)
        if context.attempt < 3:
            raise LookupError("not yet")

    runner = rabbitmq(queue, handle)
    with running(runner):
        queue.publish("m")
        eventually(lambda: runner.counts["Done"])
    assert (attempts, effects(), queue.count()) == ([1, 2, 3], 1, 0)


def test_a_message_that_can_not_be_handled_goes_to_the_dead_letters(queue):
    def refuse(message, context):
        raise RejectMessage("no such account\n")

    with running(rabbitmq(queue, refuse)):
        queue.publish("m", b'{"a": 1}', headers={"tenant": "x"}, correlation_id="c", priority=3)
        dead = eventually(queue.dead)
    assert dead.body == b'{"a": 1}'
    assert dead.headers["idempotency-reason"].strip() == "no such account"
    assert (dead.headers["tenant"], dead.properties["message_id"]) == ("x", "m")
    assert (dead.properties["correlation_id"], dead.properties["priority"]) == ("c", 3)
    assert queue.count() == 0


@pytest.mark.parametrize("id", [None, ""])
def test_a_message_without_an_id_is_a_dead_letter_with_a_reason(queue, id):
    with running(rabbitmq(queue, pay)):
        queue.publish(id)
        dead = eventually(queue.dead)
    assert dead.headers["idempotency-reason"].startswith("its id is")
    assert effects() == 0


def test_a_replayed_dead_letter_is_handled(queue):
    def crash(message, context):
        raise LookupError("broken")

    with running(rabbitmq(queue, crash, max_attempts=2)):
        queue.publish("m")
        dead = eventually(queue.dead)
    assert dead.headers["idempotency-attempts"] == "2"
    assert "attempt 2 of 2 failed: LookupError: broken" in dead.headers["idempotency-reason"]
    queue.publish("m", dead.body, headers=dead.headers)
    runner = rabbitmq(queue, pay, max_attempts=2)
    with running(runner):
        eventually(lambda: runner.counts["Done"])
    assert effects() == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("suffix", "arguments", "differs"),
    [
        (".dead", {"x-message-ttl": 60_000}, "x-message-ttl"),
        (".dead", {"x-queue-type": "quorum"}, "x-queue-type"),
        (".later.1", {"x-message-ttl": 1000}, "x-expires"),
    ],
)
def test_a_queue_with_other_arguments_ends_the_runner(queue, suffix, arguments, differs):
    def crash(message, context):
        raise LookupError("?")

    queue.declare(suffix, **arguments)
    queue.publish("m")
    with pytest.raises(
        ImproperlyConfigured, match=rf"{queue.name}{suffix}' already exists.*inequivalent arg '{differs}'"
    ):
        rabbitmq(queue, crash).run()
    eventually(lambda: queue.count() == 1)


def test_the_command_fails_over_a_queue_with_other_arguments(queue, start_consumer, monkeypatch):
    queue.declare(".dead", **{"x-max-length": 10})
    process = start_consumer("tests.consumers.consumed.rabbitmq", TEST_QUEUE=queue.name)
    assert process.wait(60) == 1
    monkeypatch.setenv("TEST_QUEUE", queue.name)
    with pytest.raises(
        CommandError, match=rf"{queue.name}.dead' already exists.*'x-max-length'.* Empty and delete the queue"
    ):
        call_command("idempotency_consume", "tests.consumers.consumed.rabbitmq")


@pytest.mark.timeout(60)
def test_a_queue_that_may_not_be_declared_ends_the_runner(queue):
    runner = rabbitmq(queue, pay, dead_letters="amq.reserved")
    with pytest.raises(ImproperlyConfigured, match=r"'amq.reserved' can't be declared.* permission to configure"):
        runner.run()


def test_a_queue_that_is_there_is_consumed_as_it_is(queue):
    queue.channel.queue_delete(queue.name)
    queue.declare("", **{"x-queue-type": "quorum"})
    queue.publish("m")
    runner = rabbitmq(queue, pay)
    with running(runner):
        eventually(lambda: runner.counts["Done"])
    assert effects() == 1


def test_what_waits_waits_behind_nothing_that_waits_longer(queue):
    def handle(message, context):
        if context.attempt == 1:
            raise LookupError(message.id)
        return pay(message, context)

    delays = iter([64, 0.1])
    runner = rabbitmq(queue, handle, backoff=lambda _attempt: next(delays))
    with running(runner):
        queue.publish("long")
        eventually(lambda: runner.counts["Retry"] == 1)
        queue.publish("short")
        eventually(lambda: runner.counts["Done"])
    assert LedgerEntry.objects.get().reference == "short"


def test_a_message_on_hold_is_looked_at_once_a_minute(queue):
    def crash(message, context):
        raise LookupError("?")

    runner = rabbitmq(queue, crash)
    with running(runner):
        queue.publish("m")
        eventually(lambda: runner.counts["Retry"])
        IdempotencyRecord.objects.update(on_hold=True)
        eventually(lambda: runner.counts["AwaitsOperator"])
    assert runner.counts["AwaitsOperator"] == 1


def test_stopping_lets_what_is_at_work_end(queue):
    gate = Gate(pay)
    runner = rabbitmq(queue, gate)
    with running(runner):
        queue.publish("m")
        assert gate.entered.wait(30)
        runner.stop()
        gate.opened.set()
    assert (runner.counts["Done"], effects(), queue.count()) == (1, 1, 0)


def test_what_was_done_when_the_broker_went_away_is_done_once(queue):
    address = urlsplit(queue.url)
    with running_proxy({"HOST": address.hostname, "PORT": address.port or 5672}) as proxy:
        login = address.netloc.rpartition("@")[0]
        gate = Gate(pay)
        runner = rabbitmq(queue, gate)
        runner.url = address._replace(netloc=f"{login}@127.0.0.1:{proxy.port}").geturl()
        with running(runner):
            queue.publish("m")
            assert gate.entered.wait(30)
            proxy.go_away()
            gate.opened.set()
            eventually(effects)
            proxy.come_back()
            eventually(lambda: runner.counts["AlreadyDone"], within=60)
    assert (gate.runs, effects(), queue.count()) == (1, 1, 0)


def test_a_connection_without_room_for_messages_stays_open(queue):
    """RabbitMQ closes a connection that sends no heartbeat for twice the time that was agreed on."""
    gate = Gate(pay)
    runner = rabbitmq(queue, gate, ahead=1)
    runner.url, runner.heartbeat = f"{queue.url}?heartbeat=1", 0.2
    with running(runner):
        queue.publish("m")
        assert gate.entered.wait(30)
        first = runner.connection
        assert first.get_heartbeat_interval() == 1
        threading.Event().wait(5)
        gate.opened.set()
        queue.publish("n")
        eventually(lambda: runner.counts["Done"] == 2)
        assert runner.connection is first


@pytest.mark.timeout(60)
def test_a_runner_stops_while_the_broker_is_away():
    runner = rabbitmq(SimpleNamespace(url="amqp://guest:guest@127.0.0.1:9//", name="none"), pay)
    thread = threading.Thread(target=runner.run)
    thread.start()
    threading.Event().wait(1)
    runner.stop()
    thread.join(15)
    assert not thread.is_alive()


def test_each_host_of_a_list_is_tried(queue):
    away = [f"amqp://guest:guest@127.0.0.1:{port}//" for port in (9, 10)]
    runner = rabbitmq(queue, pay)
    runner.url = ";".join([*away, queue.url])
    runner.open()
    assert runner.connection.connected
    runner.close()


def test_what_came_before_a_reconnection_comes_again(queue):
    """What is still in hand of the broken connection can be acknowledged no more."""
    runner = rabbitmq(queue, pay)
    runner.open()
    queue.publish("m-1")
    runner.connection.drain_events(timeout=10)
    assert not runner.message(runner._received[0]).redelivered
    runner.close()
    runner.open()
    (received,) = runner.receive(1, 10)
    assert runner.message(received).redelivered
    runner.ack(received)
    runner.close()
    assert eventually(lambda: queue.count() == 0)


def test_messages_outlive_consumers_that_are_killed(queue, start_consumer):
    for number in range(300):
        queue.publish(f"m-{number % 100}")
    for _kill in range(3):
        consumers = [start_consumer("tests.consumers.consumed.rabbitmq", TEST_QUEUE=queue.name) for _n in range(2)]
        before = effects()
        eventually(lambda before=before: effects() > before or effects() == 100, within=60)
        for consumer in consumers:
            consumer.kill()
            consumer.wait()
    start_consumer("tests.consumers.consumed.rabbitmq", TEST_QUEUE=queue.name)
    eventually(lambda: effects() == 100 and queue.count() == 0, within=90)
    assert LedgerEntry.objects.values("reference").distinct().count() == 100
