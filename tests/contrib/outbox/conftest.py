"""An outbox whose tables are emptied, and a relay that publishes to this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from django.db import transaction

from django_idempotency.contrib.outbox.models import Lane, OutboxEvent, Relay
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.outbox.relay import EventRelay
from django_idempotency.models import DatabaseNow
from tests.contrib.outbox.receiver import Receiver

if TYPE_CHECKING:
    from pytest_django.fixtures import SettingsWrapper

RECEIVER = "tests.contrib.outbox.receiver.Receiver"
MOST_STEPS = 500
CARD = "4242 4242"  # which no id or number of an event can contain


class BoundedRelay(EventRelay):
    """Fails where another would send the same events for ever."""

    steps = 0

    def step(self) -> int:
        self.steps += 1
        assert self.steps <= MOST_STEPS, "the relay does not come to an end"
        return super().step()


@pytest.fixture
def outbox(
    transactional_db: None, settings: SettingsWrapper
) -> Iterator[Callable[..., None]]:
    """``outbox(BATCH=8)`` states options; everything is published to a ``Receiver``."""

    def state(**options: Any) -> None:
        publishers = {"default": {"BACKEND": RECEIVER}}
        quick = {
            "FIRST_DELAY": 0.001,
            "LONGEST_DELAY": 0.001,
            "POLL": 0.05,
            # which a busy machine may not use up
            "SEND_TIMEOUT": 60,
            "LEASE": 60,
        }
        settings.IDEMPOTENCY = {
            "OUTBOX": {"PUBLISHERS": publishers, **quick, **options}
        }

    state()
    yield state
    for model in (OutboxEvent, Lane, Relay):
        model._default_manager.all().delete()


@pytest.fixture
def relay(outbox: Callable[..., None]) -> Iterator[Callable[..., EventRelay]]:
    """Make relays, each with a receiver of its own, which may refuse a topic; they
    leave when the test ends.
    """
    made: list[EventRelay] = []

    def make(refusing: str = "") -> EventRelay:
        made.append(BoundedRelay("default"))
        if refusing:
            receiver(made[-1]).refuses = lambda event: (
                "no" if event.topic == refusing else None
            )
        return made[-1]

    yield make
    for each in made:
        each.publisher.close()
        each.lanes.leave()


@pytest.fixture
def dead(outbox: Callable[..., None]) -> list[UUID]:
    """Three dead letters, the first two with one key: their ids."""
    with transaction.atomic():
        ids = [
            publish(topic, {"card": CARD}, key="k" if topic == "a" else "")
            for topic in "aab"
        ]
    OutboxEvent.objects.update(
        status="dead", attempts=1, error="it says no", given_up_at=DatabaseNow()
    )
    return ids


def receiver(relay: EventRelay) -> Receiver:
    assert isinstance(relay.publisher, Receiver)
    return relay.publisher
