"""``idempotency_consume``: a runner in a process of its own, and what the checks say of
it.
"""

from __future__ import annotations

import json
import time
from threading import Timer
from urllib.request import urlopen

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.backends.signals import connection_created

from django_idempotency.messages import (
    AwaitsStore,
    Backoff,
    Consumer,
    Message,
    RejectMessage,
)
from django_idempotency.messages.health import health_endpoint
from django_idempotency.messages.runner import NothingHeard, NotTaken, Runner
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.messages.brokers import Gate, beats_of, running
from tests.messages.handlers import pay, pay_from, reading
from tests.support.aliases import another_alias
from tests.support.callers import all_effects as effects
from tests.support.callers import references
from tests.support.checks import ids_found
from tests.support.waiting import eventually

HERE = "tests.messages.test_running"


class Memory(Runner[str]):
    """A broker of one process: ids, each delivered until it is settled."""

    redelivered_after = 30

    def __init__(self, consumer, *ids, **options):
        super().__init__(consumer, **options)
        self.ids, self.dead, self.put_off = list(ids), [], []

    def open(self):
        pass

    def receive(self, most, timeout):
        taken = self.ids[:most]
        del self.ids[:most]
        if not taken:
            time.sleep(0.01)
        return taken

    def message(self, received):
        return Message("memory", received, redelivered=received in self.put_off)

    def ack(self, received):
        pass

    def later(self, received, delay):
        self.put_off.append(received)
        Timer(delay, self.ids.append, [received]).start()

    def dead_letter(self, received, headers):
        self.dead.append((received, headers))


def memory():
    return Memory(
        Consumer(
            "tests", pay, policy=Policy(mode=Lease(seconds=20), retention=8 * 86400)
        )
    )


def by_lock():
    return Memory(
        Consumer(
            "tests", pay, policy=Policy(mode=Atomic(claim="lock"), retention=8 * 86400)
        )
    )


def late():
    return Memory(Consumer("tests", pay, policy=Policy(mode=Lease(seconds=60))))


no_runner = "text"


@pytest.mark.usefixtures("transactional_db")
def test_a_broken_connection_is_replaced():
    with another_alias("elsewhere", CONN_MAX_AGE=None) as alias:
        runner = Memory(
            Consumer("tests", reading(alias)),
            "last",
            "breaks",
            "next",
            "last again",
            batch=1,
        )
        with running(runner):
            eventually(lambda: sum(runner.counts.values()) >= 4)
    # again, if it comes back before the runner stops
    assert set(runner.put_off) == {"breaks"}


@pytest.mark.usefixtures("transactional_db")
def test_a_connection_is_kept_between_messages_whatever_its_age():
    opened = []
    with another_alias("elsewhere", CONN_MAX_AGE=0) as alias:
        count = lambda connection, **named: opened.append(connection.alias)  # noqa: E731
        connection_created.connect(count)
        try:
            runner = Memory(Consumer("tests", reading(alias)), "1", "2", "3", batch=1)
            with running(runner):
                eventually(lambda: sum(runner.counts.values()) == 3)
        finally:
            connection_created.disconnect(count)
    assert opened.count(alias) == 1


@pytest.mark.postgresql
@pytest.mark.parametrize("batch", [1, 4])
def test_a_runner_receives_nothing_while_the_store_is_unavailable(proxy, batch):
    runner = Memory(Consumer("tests", pay), "first", "second", batch=batch)
    proxy.away = True
    with running(runner):
        eventually(lambda: runner.counts["AwaitsStore"] >= 2)
        runner.ids += map(str, range(40))
        eventually(lambda: runner.counts["AwaitsStore"] >= 5)
        in_hand = len(runner.at_work)
        proxy.come_back()
        eventually(lambda: runner.counts["Done"] == 42)
    assert (in_hand, runner.put_off, effects()) == (min(batch, 2), [], 42)


@pytest.mark.postgresql
def test_messages_of_a_lane_keep_their_order_when_the_store_comes_back(proxy):
    class Lanes(Memory):
        def lane(self, received):
            return received[0]

    handled = []

    def handle(message, context):
        handled.append(message.id)
        # in its batch, and then alone
        if message.id == "a1" and handled.count("a1") < 3:
            raise StoreUnavailable
        return pay(message, context)

    ids = [f"{lane}{number}" for number in range(6) for lane in "ab"]
    runner = Lanes(Consumer("tests", handle), *ids, batch=4)
    proxy.away = True
    with running(runner):
        eventually(lambda: runner.counts["AwaitsStore"] > 3)
        proxy.come_back()
        eventually(lambda: runner.counts["Done"] == 12)
    done = references()
    assert [[id for id in done if id[0] == lane] for lane in "ab"] == [
        ids[::2],
        ids[1::2],
    ]


@pytest.mark.postgresql
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("claim", ["record", "lock"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_message_that_only_seems_to_lose_the_store_does_not_delay_others(
    claim, batch
):
    """It breaks its own connection each time. It goes back to its broker, and its
    attempts are counted.
    """
    dead_before = []

    def handle(message, context):
        if message.id == "poison":
            connection.connection.close()
            return None
        dead_before.extend(runner.dead)
        return pay(message, context)

    policy = Policy(mode=Atomic(claim=claim))
    runner = Memory(
        Consumer("tests", handle, max_attempts=3, policy=policy),
        "poison",
        *"abcdefghij",
        batch=batch,
    )
    with running(runner):
        eventually(lambda: runner.dead and runner.counts["Done"] == 10)
    assert "poison" in runner.put_off
    assert dead_before == []
    assert [received for received, _headers in runner.dead] == ["poison"]


class Beating(Memory):
    """Needs a heartbeat. Each message is a lane."""

    heartbeat = 0.5

    def lane(self, received):
        return received


class WithoutStore(Consumer):
    def consume_many_in_thread(self, messages, *, in_order=False):
        return [AwaitsStore(Beating.heartbeat / 10, "it is away")] * len(messages)


def brief(message, context):
    time.sleep(Beating.heartbeat / 10)


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize(
    ("consumer", "ids"),
    [
        (WithoutStore("tests", pay), "m"),
        (Consumer("tests", brief), [str(number) for number in range(40)]),
    ],
    ids=["the store is away", "many lanes"],
)
def test_a_heart_beats_by_one_clock_however_short_what_the_runner_does(consumer, ids):
    runner = Beating(consumer, *ids, batch=40)
    turns, turn = [], runner._turn
    runner._turn = lambda: (turns.append(len(beats)), turn())
    beats = beats_of(runner)
    beat = runner.keep_alive
    # at once: this thread might stop it too late
    runner.keep_alive = lambda: (beat(), len(beats) > 2 and runner.stop())
    with running(runner):
        eventually(lambda: len(beats) > 2)
    assert turns == [0]  # all of them within one turn


@pytest.mark.usefixtures("transactional_db")
def test_a_heart_beats_on_after_an_error_of_the_broker():
    gate = Gate(pay)
    runner, beats = Beating(Consumer("tests", gate), "m"), []

    def keep_alive():
        beats.append("beat")
        if len(beats) == 2:
            raise ConnectionError("throttled")

    runner.keep_alive = keep_alive
    with running(runner):
        eventually(lambda: len(beats) > 3)
        gate.opened.set()
        eventually(lambda: runner.counts["Done"])
    assert gate.runs == 1


@pytest.mark.usefixtures("transactional_db")
def test_a_message_that_the_broker_does_not_delay_is_tried_again_in_the_runner():
    class Full(Memory):
        def later(self, received, delay):
            raise NotTaken("no room")

    runner = Full(
        Consumer("tests", pay_from(3, "m"), backoff=Backoff(first=0.1)), "m", "n"
    )
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 2)
    assert (runner.counts["Retry"], effects()) == (2, 2)


@pytest.mark.usefixtures("transactional_db")
def test_runners_survive_a_message_that_can_not_be_identified():
    class Picky(Memory):
        def message(self, received):
            return Message("memory", {"m": "m-1"}[received])

    runner = Picky(Consumer("tests", pay), "poison", "m", batch=2)
    with running(runner):
        eventually(lambda: runner.counts["Done"] and runner.dead)
    ((received, headers),) = runner.dead
    assert (received, headers["idempotency-reason"]) == (
        "poison",
        "it can't be identified: KeyError('poison')",
    )


class Failing(Consumer):
    def consume_many_in_thread(self, messages, *, in_order=False):
        raise LookupError("no table")


class Unwilling(Memory):
    """Delays no message, and takes no dead letter."""

    def later(self, received, delay):
        raise NotTaken("no room")

    def dead_letter(self, received, headers):
        raise NotTaken("no queue")


class Broken(Memory):
    def receive(self, most, timeout):
        raise self.ids.pop(0) if self.ids else NothingHeard("no topic")


def refusing(message, context):
    raise RejectMessage("no amount")


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize(
    ("event", "runner"),
    [
        ("dead_lettered", Memory(Consumer("tests", refusing), "m")),
        ("dead_letter_not_taken", Unwilling(Consumer("tests", refusing), "m")),
        ("delay_not_taken", Unwilling(Failing("tests", refusing), "m")),
        ("handler_failed", Memory(Failing("tests", refusing), "m")),
        ("receiving_paused", Memory(WithoutStore("tests", refusing), "m")),
        ("broker_unavailable", Broken(Consumer("tests", refusing), ConnectionError())),
        (
            "broker_unavailable",
            Broken(Consumer("tests", refusing), NothingHeard("away")),
        ),
    ],
)
def test_log_records_of_a_runner_name_its_handler(event, runner, caplog):
    def said():
        named = [entry for entry in caplog.records if hasattr(entry, "event")]
        return [entry for entry in named if entry.event == event]

    with running(runner):
        eventually(said)
        runner.stop()
    assert said()[0].view == f"{HERE}.refusing"
    assert said()[0].getMessage().endswith(f" [{HERE}.refusing]")


@pytest.mark.usefixtures("transactional_db")
def test_stopping_lets_what_is_at_work_end_and_leaves_the_rest():
    gate = Gate(pay)
    runner = Memory(Consumer("tests", gate), "m", "n", batch=1)
    with running(runner):
        assert gate.entered.wait(60)
        runner.stop()
        gate.opened.set()
    assert (runner.counts["Done"], effects(), runner.ids) == (1, 1, ["n"])


@pytest.mark.postgresql
def test_a_runner_stops_while_the_store_is_unavailable(proxy):
    runner = Memory(Consumer("tests", pay), "m")
    proxy.away = True
    with running(runner):
        eventually(lambda: runner.counts["AwaitsStore"])
        assert runner.is_healthy
    assert (runner.at_work, runner.put_off, runner.is_healthy) == (["m"], [], False)


@pytest.mark.usefixtures("transactional_db")
def test_the_health_endpoint_says_whether_messages_are_looked_for():
    gate = Gate(pay)
    runner = Memory(Consumer("tests", gate), "m")
    with running(runner), health_endpoint(runner, "127.0.0.1:0") as port:
        assert gate.entered.wait(60)
        with urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            state = json.load(answer)
        gate.opened.set()
        eventually(lambda: runner.counts["Done"])
    assert (answer.status, state["healthy"], state["at_work"]) == (200, True, 1)
    assert not runner.is_healthy


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


def test_checks_of_runners(settings, db):
    settings.IDEMPOTENCY = {
        "CONSUMERS": [f"{HERE}.{name}" for name in ("nothing", "no_runner", "memory")]
    }
    assert ids_found("E037", "W038", "W039") == ["E037", "E037"]


def test_a_coroutine_function_is_refused_by_a_runner():
    async def handle(message, context):
        raise AssertionError("it ran")

    with pytest.raises(ImproperlyConfigured, match="is async"):
        Memory(Consumer("tests", handle))


def test_a_project_of_consumers_alone_is_checked(settings, db):
    """It needs no URLs. Checks run before every ``migrate``."""
    del settings.ROOT_URLCONF
    settings.IDEMPOTENCY = {"CONSUMERS": [f"{HERE}.memory"]}
    assert ids_found("E037", "W038", "W039") == []


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 1.5}])
def test_numbers_of_a_runner_are_counts(options):
    with pytest.raises(ImproperlyConfigured, match="must be an integer from 1"):
        Memory(Consumer("tests", pay), **options)
