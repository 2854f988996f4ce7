"""An outbox whose tables are emptied, and a relay that publishes to this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_idempotency.outbox.models import Lane, OutboxEvent, Relay
from django_idempotency.outbox.relay import EventRelay
from tests.outbox.receiver import Receiver

if TYPE_CHECKING:
    from pytest_django.fixtures import SettingsWrapper

RECEIVER = "tests.outbox.receiver.Receiver"
MOST_STEPS = 500


class BoundedRelay(EventRelay):
    """Fails where another would send the same events for ever."""

    steps = 0

    def step(self) -> int:
        self.steps += 1
        assert self.steps <= MOST_STEPS, "the relay does not come to an end"
        return super().step()


@pytest.fixture
def outbox(transactional_db: None, settings: SettingsWrapper) -> Iterator[Callable[..., None]]:
    """``outbox(DEAD_HEAD="free")`` states options; everything is published to a ``Receiver``."""

    def state(**options: Any) -> None:
        publishers = {"default": {"BACKEND": RECEIVER}}
        quick = {"FIRST_DELAY": 0.001, "LONGEST_DELAY": 0.001, "POLL": 0.05, "SEND_TIMEOUT": 5}
        settings.IDEMPOTENCY = {"OUTBOX": {"PUBLISHERS": publishers, **quick, **options}}

    state()
    yield state
    for model in (OutboxEvent, Lane, Relay):
        model._default_manager.all().delete()


@pytest.fixture
def relay(outbox: Callable[..., None]) -> Iterator[Callable[[], EventRelay]]:
    """Make relays, each with a receiver of its own; they leave when the test ends."""
    made: list[EventRelay] = []

    def make() -> EventRelay:
        made.append(BoundedRelay("default"))
        return made[-1]

    yield make
    for each in made:
        each.lanes.leave()


def receiver(relay: EventRelay) -> Receiver:
    assert isinstance(relay.publisher, Receiver)
    return relay.publisher
