"""What the runner of every broker keeps. A wing's test class derives from it, and has a
fixture ``broker``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from django_idempotency.messages import RejectMessage
from django_idempotency.messages.runner import Runner
from testproject.models import LedgerEntry
from tests.messages.brokers import running
from tests.messages.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

SECONDS = 15  # of an outage, after which a message would have been redelivered


@dataclass(frozen=True)
class Dead:
    """A dead letter, as its broker keeps it."""

    body: bytes
    headers: Mapping[str, str]


class Broker(Protocol):
    """A queue of the test's own, and one of dead letters."""

    def runner(
        self,
        handler: Any,
        *,
        max_attempts: int = 10,
        identified: bool = True,
        **options: Any,
    ) -> Runner[Any]:
        """A runner whose first delay is short. ``identified``: whether messages have an
        id of their own.
        """

    def publish(
        self, *ids: str | None, body: bytes = b"{}", headers: Mapping[str, str] = {}
    ) -> None: ...

    def take_dead(self) -> Dead | None: ...

    def is_empty(self) -> bool:
        """Whether every message is settled."""


def refuse(message: Any, context: Any) -> None:
    raise RejectMessage("no such\naccount")


class OutageContract:
    """For brokers that deliver a message again unless they hear of it in time:
    ``redelivering`` are options of a runner, for twelve seconds: a busy machine may be
    late with a heartbeat.
    """

    redelivering: Mapping[str, Any]

    @pytest.mark.postgresql
    def test_a_message_in_hand_is_not_redelivered_while_the_store_is_away(
        self, broker: Broker, proxy: Proxy
    ) -> None:
        """The store is asked once a second, which is less than a heartbeat."""
        proxy.away = True
        broker.publish(*"abcde")
        runners = [broker.runner(pay, **self.redelivering) for _n in range(2)]
        with running(*runners):
            in_hand = lambda: sum(len(runner.at_work) for runner in runners)  # noqa: E731
            eventually(lambda: in_hand() == 5)
            for runner in runners:
                runner.counts.clear()
            over = time.monotonic() + SECONDS
            eventually(
                lambda: (
                    time.monotonic() > over
                    and all(
                        runner.counts["AwaitsStore"] >= 2 * len(runner.at_work)
                        for runner in runners
                    )
                )
            )
            assert in_hand() == 5
            proxy.come_back()
            eventually(broker.is_empty, every=0.2)
        done = sum((runner.counts for runner in runners), Counter())
        assert (done["Done"], done["AlreadyDone"], effects()) == (5, 0, 5)


class RunnerContract:
    def test_each_message_takes_effect_once_however_often_it_comes(
        self, broker: Broker
    ) -> None:
        broker.publish(*(f"m-{number % 10}" for number in range(50)))
        runners = [broker.runner(pay) for _n in range(2)]
        with running(*runners):
            eventually(
                lambda: (
                    sum(
                        runner.counts["Done"] + runner.counts["AlreadyDone"]
                        for runner in runners
                    )
                    >= 50
                )
            )
            # some of the 50 may have been redelivered
            eventually(lambda: effects() >= 10)
            eventually(broker.is_empty, every=0.2)
        assert (effects(), sum(runner.counts["Done"] for runner in runners)) == (10, 10)

    def test_a_handler_that_fails_is_tried_again_until_it_succeeds(
        self, broker: Broker
    ) -> None:
        attempts = []

        def handle(message: Any, context: Any) -> None:
            pay(message, context)
            attempts.append((context.attempt, message.redelivered))
            if context.attempt < 3:
                raise LookupError("not yet")

        runner = broker.runner(handle)
        broker.publish("m")
        with running(runner):
            eventually(lambda: runner.counts["Done"])
            eventually(broker.is_empty, every=0.2)
        assert [attempt for attempt, _redelivered in attempts] == [1, 2, 3]
        assert (runner.counts["Retry"], effects()) == (2, 1)
        if runner.tells_redeliveries:
            assert [
                redelivered for _attempt, redelivered in attempts
            ] == self.told_of_retries

    told_of_retries = [False, True, True]

    def test_a_dead_letter_keeps_what_it_was(self, broker: Broker) -> None:
        broker.publish("m", body=b'{"a": 1}', headers={"tenant": "x"})
        with running(broker.runner(refuse)):
            dead = eventually(broker.take_dead, every=0.2)
            eventually(broker.is_empty, every=0.2)
        assert (dead.body, dead.headers["tenant"]) == (b'{"a": 1}', "x")
        assert dead.headers["idempotency-reason"] == "no such account"

    def test_two_copies_of_a_dead_letter_are_the_message_that_it_was(
        self, broker: Broker
    ) -> None:
        """A process that dies while it moves a message leaves a copy. An operator may
        send both back.
        """
        handled: list[str] = []

        def crash(message: Any, context: Any) -> None:
            handled.append(message.id)
            raise LookupError("broken")

        broker.publish(None)
        with running(broker.runner(crash, max_attempts=1, identified=False)):
            dead = eventually(broker.take_dead, every=0.2)
        assert (
            "attempt 1 of 1 failed: LookupError: broken"
            in dead.headers["idempotency-reason"]
        )
        assert dead.headers["idempotency-attempts"] == "1"

        def note(message: Any, context: Any) -> None:
            handled.append(message.id)
            raise RejectMessage("no such account")

        broker.publish(None, None, body=dead.body, headers=dead.headers)
        runner = broker.runner(note, max_attempts=1, identified=False)
        with running(runner):
            eventually(lambda: runner.counts["Refused"] >= 2)
        dead = eventually(broker.take_dead, every=0.2)
        broker.publish(None, body=dead.body, headers=dead.headers)
        with running(runner := broker.runner(note, max_attempts=1, identified=False)):
            eventually(lambda: runner.counts["Refused"])
        assert len(handled) == 2
        assert len(set(handled)) == 1


class CrashContract:
    """``consumed``: the runner that processes of their own run, in the broker's
    ``environment``.
    """

    consumed = ""

    def test_messages_outlive_consumers_that_are_killed(
        self, broker: Any, start_consumer: Any
    ) -> None:
        broker.publish(*(f"m-{number % 60}" for number in range(180)))
        consumers = [
            start_consumer(self.consumed, **broker.environment) for _n in range(2)
        ]
        eventually(effects, within=180)
        for consumer in consumers:
            consumer.kill()
            consumer.wait()
        start_consumer(self.consumed, **broker.environment)
        eventually(lambda: effects() == 60 and broker.is_empty(), within=240, every=0.3)
        assert LedgerEntry.objects.values("reference").distinct().count() == 60
