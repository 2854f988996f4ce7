"""What is promised of the outbox, with relays as processes that are killed, paused and
set against each other.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from django.db import transaction

from django_idempotency.contrib.outbox.models import Lane, OutboxEvent, Relay
from django_idempotency.contrib.outbox.publishing import publish
from tests.contrib.outbox.events import none_left
from tests.support.databases import environment
from tests.support.waiting import eventually

pytestmark = pytest.mark.row_locks

ROOT = Path(__file__).parents[3]
KEYS = 20


class Relays:
    """Relays as processes, all of which write what they publish to one file."""

    def __init__(self, directory):
        self.file = directory / "published"
        self.gate = directory / "gate"
        self.log = directory / "log"
        self.file.touch()
        self.processes = []

    def start(self, *arguments, gate_after=None, **options):
        given = {"path": str(self.file)}
        if gate_after is not None:
            given |= {"gate": str(self.gate), "gate_after": gate_after}
        publishers = {
            "default": {
                "BACKEND": "tests.contrib.outbox.receiver.FileReceiver",
                "OPTIONS": given,
            }
        }
        outbox = {
            "PUBLISHERS": publishers,
            "LEASE": 2.0,
            "POLL": 0.1,
            "SEND_TIMEOUT": 60,
            **options,
        }
        stated = {"WORKER_SETTINGS": json.dumps({"IDEMPOTENCY": {"OUTBOX": outbox}})}
        stated["DJANGO_SETTINGS_MODULE"] = "tests.messages.worker_settings"
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "django", "idempotency_outbox", "relay"]
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                env=environment() | stated,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def published(self):
        """By line: the process, the key, the topic and the id of an event."""
        return [line.split() for line in self.file.read_text().splitlines()]

    def are_all_in_order(self, count):
        """Whether ``count`` events were published, those of each key in order, whatever
        was published twice.
        """
        order = {}
        for _pid, key, topic, _id in self.published():
            order.setdefault(key, {})[topic] = None
        return sum(map(len, order.values())) == count and all(
            list(topics) == sorted(topics) for topics in order.values()
        )

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def relays(outbox, tmp_path):
    made = Relays(tmp_path)
    yield made
    made.end()


def shares_are_even():
    """Of 64 lanes: 22, 22 and 20, or 22, 21 and 21."""
    shares = Counter(Lane.objects.values_list("relay_id", flat=True))
    return None not in shares and len(shares) == 3 and max(shares.values()) == 22


def publish_many(count, start=0):
    with transaction.atomic():
        for number in range(start, start + count):
            publish(f"{number:06}", {}, key=f"key-{number % KEYS}")


@pytest.mark.parametrize("started", [[[]] * 3, [["--relays", "3"]]])
def test_several_relays_share_the_work_and_keep_the_order(relays, started):
    # one that lost its lanes, because it stood still, would publish some events twice
    processes = [relays.start(*arguments, LEASE=120) for arguments in started]
    eventually(lambda: Relay.objects.count() == 3, within=180)
    # one that had to join twice is counted twice until its first lease has ended
    eventually(shares_are_even, within=300)
    for start in range(0, 900, 100):
        publish_many(100, start)
    eventually(none_left, within=300)
    published = relays.published()
    assert len(published) == 900  # nobody died, so none twice
    assert {int(pid) for pid, *_ in published} <= {process.pid for process in processes}
    assert (len({pid for pid, *_ in published}) > 1) == (len(started) > 1)
    assert relays.are_all_in_order(900)


def test_kills_under_load_lose_nothing_and_keep_the_order(relays):
    running = [relays.start(), relays.start()]
    for start in range(0, 600, 200):
        publish_many(200, start)
        eventually(lambda: OutboxEvent.objects.count() < 150, within=180)
        running.pop(0).kill()
        running.append(relays.start())
    eventually(none_left, within=180)
    assert relays.are_all_in_order(600)


def test_a_relay_that_was_paused_has_lost_its_lanes(relays):
    relays.gate.touch()
    publish_many(100)
    paused = relays.start(gate_after=30)
    eventually(lambda: len(relays.published()) == 30, within=180)
    lanes = set(Lane.objects.values_list("relay_id", flat=True))
    paused.send_signal(signal.SIGSTOP)
    relays.start()
    eventually(none_left, within=180)
    relays.gate.unlink()
    publish_many(100, 100)
    paused.send_signal(signal.SIGCONT)
    eventually(none_left, within=120)
    eventually(lambda: Relay.objects.count() == 2, within=120)
    assert not lanes & set(Relay.objects.values_list("id", flat=True))
    assert relays.are_all_in_order(200)


def test_sigterm_ends_a_relay_after_its_batch_and_frees_its_lanes(relays):
    relays.gate.touch()
    publish_many(40)
    one = relays.start(gate_after=1)
    eventually(lambda: relays.published(), within=180)
    one.terminate()
    relays.gate.unlink()
    assert one.wait(120) == 0
    assert len(relays.published()) + OutboxEvent.objects.count() == 40
    assert not Relay.objects.exists()
    assert set(Lane.objects.values_list("relay_id", flat=True)) == {None}
