"""``idempotency_consume``: a runner in a process of its own, and what the checks say of it."""

from __future__ import annotations

import json
import signal
from urllib.request import urlopen
from uuid import uuid4

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from django_idempotency.consumers import Consumer, Message
from django_idempotency.consumers.health import health_endpoint
from django_idempotency.consumers.runner import Runner
from django_idempotency.policy import Policy
from tests.consumers.brokers import Gate, running
from tests.consumers.handlers import pay, reading
from tests.support.aliases import another_alias
from tests.support.callers import all_effects as effects
from tests.support.waiting import eventually

HERE = "tests.consumers.test_running"


class Memory(Runner[str]):
    """A broker of one process: ids, each delivered until it is settled."""

    redelivered_after = 30

    def __init__(self, consumer, *ids, **options):
        super().__init__(consumer, **options)
        self.ids, self.dead, self.put_off = list(ids), [], []

    def open(self):
        pass

    def receive(self, most, timeout):
        taken, self.ids = self.ids[:most], self.ids[most:]
        return taken

    def message(self, received):
        return Message("memory", received)

    def ack(self, received):
        pass

    def later(self, received, delay):
        self.put_off.append((received, delay))

    def dead_letter(self, received, headers):
        self.dead.append((received, headers))


def memory():
    return Memory(Consumer("tests", pay, policy=Policy(mode="lease", lease=20, retention=8 * 86400)))


def by_lock():
    return Memory(Consumer("tests", pay, policy=Policy(claim="lock", retention=8 * 86400)))


def late():
    return Memory(Consumer("tests", pay, policy=Policy(mode="lease", lease=60)))


no_runner = "text"


@pytest.mark.usefixtures("transactional_db")
def test_a_handler_that_ends_its_thread_ends_no_runner():
    def handle(message, context):
        if message.id == "exit":
            raise SystemExit(3)
        return pay(message, context)

    runner = Memory(Consumer("tests", handle), "exit", "m")
    with running(runner):
        eventually(lambda: runner.counts["Done"] and runner.put_off)
    assert [received for received, _delay in runner.put_off] == ["exit"]
    assert effects() == 1


@pytest.mark.usefixtures("transactional_db")
def test_a_broken_connection_of_a_thread_is_replaced():
    with another_alias("elsewhere", CONN_MAX_AGE=None) as alias:
        runner = Memory(Consumer("tests", reading(alias)), "last", "breaks", "next", "last again")
        with running(runner):
            eventually(lambda: sum(runner.counts.values()) == 4)
    assert [received for received, _delay in runner.put_off] == ["breaks"]


@pytest.mark.usefixtures("transactional_db")
def test_a_message_that_can_not_be_identified_ends_no_runner():
    class Picky(Memory):
        def message(self, received):
            return Message("memory", {"m": "m-1"}[received])

    runner = Picky(Consumer("tests", pay), "poison", "m", batch=2)
    with running(runner):
        eventually(lambda: runner.counts["Done"] and runner.dead)
    ((received, headers),) = runner.dead
    assert (received, headers["idempotency-reason"]) == ("poison", "it can't be identified: KeyError('poison')")


@pytest.mark.usefixtures("transactional_db")
def test_the_health_endpoint_says_whether_messages_are_looked_for():
    gate = Gate(pay)
    runner = Memory(Consumer("tests", gate), "m")
    with running(runner), health_endpoint(runner, "127.0.0.1:0") as port:
        assert gate.entered.wait(30)
        with urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            state = json.load(answer)
        gate.opened.set()
        eventually(lambda: runner.counts["Done"])
    assert (answer.status, state["healthy"], state["at_work"]) == (200, True, 1)
    assert not runner.is_healthy


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"batch": 0}, {"concurrency": 1.5}])
def test_numbers_of_a_runner_are_counts(options):
    with pytest.raises(ImproperlyConfigured, match="must be an integer from 1"):
        Memory(Consumer("tests", pay), **options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.at.all"], "nowhere"),
        ([f"{HERE}.no_runner"], "it must be a runner"),
        ([], "Pass the dotted path of the runner"),
        ([f"{HERE}.memory", "--health", "x"], "it must be a port"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, sentence):
    with pytest.raises(CommandError, match=sentence):
        call_command("idempotency_consume", *arguments)


def found(settings, *paths):
    settings.IDEMPOTENCY = {"CONSUMERS": [f"{HERE}.{path}" for path in paths]}
    ids = [message.id.rpartition(".")[2] for message in checks.run_checks()]
    return [id for id in ids if id in ("E043", "W044", "W045", "W047")]


def test_checks_of_runners(settings, db, monkeypatch):
    assert found(settings, "memory") == []
    assert found(settings, "late") == ["W044", "W045"]
    assert found(settings, "by_lock") == ["W047"]
    monkeypatch.setattr(Memory, "tells_redeliveries", True)
    assert found(settings, "by_lock") == []
    assert found(settings, "nothing", "no_runner") == ["E043", "E043"]


def test_a_coroutine_function_is_refused_by_a_runner():
    async def handle(message, context):
        raise AssertionError("it ran")

    with pytest.raises(ImproperlyConfigured, match="is async"):
        Memory(Consumer("tests", handle))


def test_a_project_of_consumers_alone_is_checked(settings, db):
    """It needs no URLs. Checks run before every ``migrate``."""
    del settings.ROOT_URLCONF
    assert found(settings, "memory") == []


@pytest.mark.rabbitmq
def test_the_command_stops_when_it_is_told_to(start_consumer):
    process = start_consumer("tests.consumers.consumed.rabbitmq", TEST_QUEUE=f"idempotency-test-{uuid4().hex}")
    assert b"Consuming with" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout.read() == b"Stopped: no messages\n"
