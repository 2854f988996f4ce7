"""Send messages from the outbox to the inbox while relays, consumers and the broker are
killed, and judge the result.

    python -m tests.faults.deliveries rabbitmq --events 20000     # or jetstream, or
    kafka python -m tests.faults.deliveries rabbitmq --events 2000 --outage 30

Every event is sent to its broker five times. Database, broker and processes are the
campaign's own. With ``--outage``, the database and then the broker are away for so many
seconds, while processes are killed. Kafka is librdkafka's mock cluster, which keeps
nothing on a disk: it is never killed, but frozen. Exits with an error if an event was
lost, took effect twice, was delivered fewer than five times, or was published out of
the order of its key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testproject.interrupts import end_on_signals
from tests.faults.cluster import Cluster
from tests.support.brokers import on_jetstream
from tests.support.mock_kafka import PrivateKafka
from tests.support.private_servers import PrivateNATS, PrivateRabbitMQ, PrivateServer
from tests.support.servers import ROOT
from tests.support.waiting import eventually

WINGS = "django_idempotency.contrib"
COPIES = 5
NAME = "deliveries"  # of the queue, the exchange, the stream and the consumer
ID = "X-Event"  # header with the event's id, if the broker has to have another id
OF_A_KEY = 50  # events
TOGETHER = 50  # events that one transaction publishes
# events that are published and have no effect yet; the mock cluster keeps 5 MB a
# partition
AHEAD = 1_500
COMMANDS = {
    "relay": ("idempotency_outbox", "relay"),
    "consumer": ("idempotency_consume", "tests.faults.delivered.runner"),
}


# --- Brokers --------------------------------------------------------------------------


class Broker(ABC):
    """A broker of the campaign's own. ``every``: seconds between two kills of its
    ``server``, if it survives them.
    """

    kind: str
    url: str
    server: PrivateServer
    every: float | None = None
    keeps_order_of_effects = False

    @abstractmethod
    def start(self) -> None:
        """It, and what it has to have before others come."""

    @abstractmethod
    def publisher(self) -> dict[str, Any]:
        """``BACKEND`` and ``OPTIONS``."""

    @abstractmethod
    def arrivals(self) -> list[str]:
        """The ids of the events in the order in which the broker has them, copies
        too.
        """

    @contextmanager
    def away(self) -> Iterator[None]:
        self.server.kill()
        yield
        self.server.start()


class RabbitMQ(Broker):
    """Publishes to an exchange that has two queues: the consumers' queue, and one that
    nobody consumes.
    """

    kind, every = "rabbitmq", 45.0

    def __init__(self, directory: Path) -> None:
        self.server = PrivateRabbitMQ(directory)
        self.url = self.server.url

    def start(self) -> None:
        self.server.start()
        with self._channel() as channel:
            channel.exchange_declare(NAME, "fanout", durable=True, auto_delete=False)
            for queue in (NAME, "arrivals"):
                channel.queue_declare(queue, durable=True, auto_delete=False)
                channel.queue_bind(queue, NAME)

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        import kombu

        with kombu.Connection(self.url) as connection:
            yield connection.channel()

    def publisher(self) -> dict[str, Any]:
        return _five_times(
            f"{WINGS}.rabbitmq.RabbitMQPublisher", url=self.url, exchange=NAME
        )

    def arrivals(self) -> list[str]:
        with self._channel() as channel:
            messages = iter(lambda: channel.basic_get("arrivals", no_ack=True), None)
            return [message.properties["message_id"] for message in messages]


class JetStream(Broker):
    kind, every = "jetstream", 20.0

    def __init__(self, directory: Path) -> None:
        self.server = PrivateNATS(directory)
        self.url = self.server.url

    def start(self) -> None:
        self.server.start()
        on_jetstream(
            self.url,
            lambda stream: stream.add_stream(name=NAME, subjects=[f"{NAME}.>"]),
        )

    def publisher(self) -> dict[str, Any]:
        options = {"servers": self.url, "prefix": f"{NAME}."}
        return _five_times(f"{WINGS}.nats.NATSPublisher", renamed=True, **options)

    def arrivals(self) -> list[str]:
        async def read(stream: Any) -> list[str]:
            count = (await stream.stream_info(NAME)).state.messages
            reading = await stream.pull_subscribe(f"{NAME}.>", stream=NAME)
            found: list[str] = []
            while len(found) < count:
                messages = await reading.fetch(min(500, count - len(found)), timeout=30)
                found += [message.headers[ID] for message in messages]
                await asyncio.gather(*(message.ack() for message in messages))
            return found

        return list(on_jetstream(self.url, read))


class Kafka(Broker):
    """What arrived is read continuously, because the mock cluster forgets it."""

    kind = "kafka"
    keeps_order_of_effects = True

    def __init__(self, directory: Path) -> None:
        self.server = self.cluster = PrivateKafka(directory)
        self.over = threading.Event()
        self.found: list[str] = []

    def start(self) -> None:
        self.cluster.start()
        self.url = self.cluster.url
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def publisher(self) -> dict[str, Any]:
        return _five_times(
            f"{WINGS}.kafka.KafkaPublisher", config={"bootstrap.servers": self.url}
        )

    @contextmanager
    def away(self) -> Iterator[None]:
        self.server.freeze()
        yield
        self.server.thaw()

    def _read(self) -> None:
        from confluent_kafka import Consumer

        config = {
            "bootstrap.servers": self.url,
            "group.id": "arrivals",
            "auto.offset.reset": "earliest",
        }
        client = Consumer(config)
        client.subscribe(["orders"])
        while (messages := client.consume(500, 1.0)) or not self.over.is_set():
            self.found += [
                dict(message.headers())["ce_id"].decode()
                for message in messages
                if not message.error()
            ]
        client.close()

    def arrivals(self) -> list[str]:
        self.over.set()
        self.reading.join()
        return self.found


BROKERS: Mapping[str, type[Any]] = {
    broker.kind: broker for broker in (RabbitMQ, JetStream, Kafka)
}


def _five_times(
    backend: str, *, renamed: bool = False, **options: Any
) -> dict[str, Any]:
    given = {"backend": backend, "options": options, "renamed": renamed}
    return {"BACKEND": "tests.faults.delivered.FiveTimes", "OPTIONS": given}


# --- What came of it ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """An event: its id, its key and its number within the key."""

    id: str
    key: str
    number: int


@dataclass(frozen=True)
class Seen:
    """What a campaign leaves behind. ``effects``: ids of events in the order in which
    their effects were made.
    """

    published: Sequence[Published]
    arrivals: Sequence[str]
    deliveries: Mapping[str, int]
    effects: Sequence[str]


def judged(
    seen: Seen, *, order_of_effects: bool, copies: int = COPIES
) -> dict[str, int]:
    """How many events each promise was broken for."""
    effects = Counter(seen.effects)
    known = {event.id: event for event in seen.published}
    return {
        "lost": sum(effects[id] == 0 for id in known),
        "twice": sum(count > 1 for count in effects.values()),
        "from nowhere": len(effects.keys() - known.keys()),
        "delivered too rarely": sum(
            seen.deliveries.get(id, 0) < copies for id in known
        ),
        "published out of order": _out_of_order(known, seen.arrivals),
        "effects out of order": (
            _out_of_order(known, seen.effects) if order_of_effects else 0
        ),
    }


def _out_of_order(known: Mapping[str, Published], ids: Iterable[str]) -> int:
    """How many events came, for the first time, before one of their key that is
    older.
    """
    last: dict[str, int] = defaultdict(lambda: -1)
    seen, count = set[str](), 0
    for id in ids:
        if id in seen or id not in known:
            continue
        seen.add(id)
        event = known[id]
        count += event.number < last[event.key]
        last[event.key] = max(last[event.key], event.number)
    return count


# --- Processes ------------------------------------------------------------------------


@dataclass
class Fleet:
    """Processes by name, such as ``relay 1``. They are killed at random, and started
    again.
    """

    environment: Mapping[str, str]
    log: Path
    commands: Mapping[str, Sequence[str]] = field(default_factory=lambda: COMMANDS)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    died: Counter[str] = field(default_factory=Counter)

    def start(self, *names: str) -> None:
        for name in names:
            with self.log.open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "django", *self.commands[name.split()[0]]],
                    cwd=ROOT,
                    env=os.environ | self.environment,
                    stdout=log,
                    stderr=log,
                )

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.wait()
        self.start(name)

    def revive(self) -> None:
        """Those that ended by themselves, which none should."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self.died[name.split()[0]] += 1
                self.start(name)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
            process.wait()


def harm(
    fleet: Fleet,
    broker: PrivateServer,
    every: float | None,
    pause: float,
    decide: random.Random,
    over: threading.Event,
) -> Counter[str]:
    """Kill one process every ``pause`` seconds, and the broker ``every`` so many;
    return how often each was.
    """
    done: Counter[str] = Counter()
    broker_due = time.monotonic() + (every or math.inf)
    while not over.wait(decide.uniform(pause / 2, pause * 1.5)):
        fleet.revive()
        if time.monotonic() >= broker_due:
            broker.kill()
            over.wait(decide.uniform(0, 2))
            broker.start()
            done["broker"] += 1
            broker_due = time.monotonic() + (every or math.inf)
        else:
            name = decide.choice([*fleet.processes])
            fleet.kill(name)
            done[name.split()[0]] += 1
    return done


def take_away(
    places: Mapping[str, Callable[[], AbstractContextManager[None]]],
    seconds: float,
    over: threading.Event,
) -> Counter[str]:
    """Have each place be away for ``seconds``, and all be there as long before; return
    which ones were away.
    """
    done: Counter[str] = Counter()
    for name, away in places.items():
        if over.wait(seconds):
            break
        with away():
            over.wait(seconds)
        done[f"{name} away"] += 1
    return done


# --- The campaign ---------------------------------------------------------------------


@dataclass
class Report:
    events: int
    seconds: float
    kills: Counter[str]
    died: Counter[str]
    arrived: int
    delivered: int
    broken: dict[str, int]


def campaign(
    broker: Broker,
    cluster: Cluster,
    directory: Path,
    *,
    events: int,
    seed: int,
    pause: float,
    patience: float,
    outage: float = 0,
) -> Report:
    begun = time.monotonic()
    broker.start()
    log = directory / "deliveries"
    log.touch()
    outbox = {
        "PUBLISHERS": {"default": broker.publisher()},
        "LEASE": 5,
        "POLL": 0.5,
        "LONGEST_DELAY": 5,
    }
    outbox |= {"MAX_ATTEMPTS": 1000, "FIRST_DELAY": 0.1}
    fleet = Fleet(
        {
            "DATABASE_URL": cluster.url(),
            "DJANGO_SETTINGS_MODULE": "tests.messages.worker_settings",
            "WORKER_SETTINGS": json.dumps({"IDEMPOTENCY": {"OUTBOX": outbox}}),
            "CAMPAIGN": json.dumps(
                {"kind": broker.kind, "url": broker.url, "log": str(log)}
            ),
        },
        directory / "processes.log",
    )
    fleet.start("relay 1", "relay 2", "consumer 1", "consumer 2")
    over, kills, publishing = threading.Event(), Counter[str](), threading.Lock()

    @contextmanager
    def database_away() -> Iterator[None]:
        with publishing:
            cluster.kill()
            yield
            cluster.start()

    places = {"database": database_away, "broker": broker.away} if outage else {}
    every = None if outage else broker.every
    troubles = [
        lambda: kills.update(
            harm(fleet, broker.server, every, pause, random.Random(seed), over)
        ),
        lambda: kills.update(take_away(places, outage, over)),
    ]
    threads = [threading.Thread(target=trouble, daemon=True) for trouble in troubles]
    for thread in threads:
        thread.start()
    try:
        published = list(_publish(events, publishing, outage * (2 * len(places) + 1)))
        over.set()
        for thread in threads:
            thread.join()
        fleet.revive()
        with suppress(TimeoutError):
            eventually(lambda: _is_complete(log, events), within=patience, every=1)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        fleet.stop()
    deliveries = Counter(log.read_text().split())
    seen = Seen(published, broker.arrivals(), deliveries, _effects())
    broken = judged(seen, order_of_effects=broker.keeps_order_of_effects)
    seconds = time.monotonic() - begun
    return Report(
        events,
        seconds,
        kills,
        fleet.died,
        len(seen.arrivals),
        sum(deliveries.values()),
        broken,
    )


def _publish(
    events: int, publishing: threading.Lock, seconds: float
) -> Iterator[Published]:
    """Publish over so many seconds, or longer."""
    from django.db import connection, transaction

    from django_idempotency.contrib.outbox.publishing import publish

    begun, keys = time.monotonic(), max(1, events // OF_A_KEY)
    for start in range(0, events, TOGETHER):
        time.sleep(max(0.0, begun + seconds * start / events - time.monotonic()))
        with publishing:
            connection.close()  # the database may have been away since
            eventually(
                lambda start=start: start - _count_effects() < AHEAD,
                within=600,
                every=0.2,
            )
            with transaction.atomic():
                for place in range(start, min(start + TOGETHER, events)):
                    key, number = f"key-{place % keys}", place // keys
                    id = publish("orders", {"key": key, "number": number}, key=key)
                    yield Published(str(id), key, number)


def _count_effects() -> int:
    from testproject.models import Receipt

    return Receipt.objects.count()


def _effects() -> list[str]:
    from testproject.models import Receipt

    return list(Receipt.objects.order_by("pk").values_list("event", flat=True))


def _is_complete(log: Path, events: int) -> bool:
    from django_idempotency.contrib.outbox.models import OutboxEvent

    if OutboxEvent.objects.exists() or _count_effects() < events:
        return False
    deliveries = Counter(log.read_text().split())
    return len(deliveries) == events and min(deliveries.values()) >= COPIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.deliveries", description=__doc__
    )
    parser.add_argument("broker", choices=[*BROKERS])
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument(
        "--pause", type=float, default=4.0, help="seconds between two kills, on average"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=180,
        help="seconds for what is left once the kills are over",
    )
    parser.add_argument(
        "--outage",
        type=float,
        default=0,
        help="seconds for which database and broker are away once",
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--log", type=Path, help="a file to copy the processes' output to"
    )
    asked = parser.parse_args()
    end_on_signals()
    seed = random.randrange(2**32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    with ExitStack() as stack:
        report = _run(stack, asked, seed)
    _print(asked.broker, report)
    return 1 if any(report.broken.values()) else 0


def _run(stack: ExitStack, asked: argparse.Namespace, seed: int) -> Report:
    from tests.faults import scenarios

    cluster, directory = stack.enter_context(scenarios.ground())
    os.environ.update(
        DATABASE_URL=cluster.url(), DJANGO_SETTINGS_MODULE="testproject.settings"
    )
    import django

    django.setup()
    broker: Broker = BROKERS[asked.broker](directory)
    stack.callback(broker.server.kill)
    options = {
        name: getattr(asked, name) for name in ("events", "pause", "patience", "outage")
    } | {"seed": seed}
    try:
        return campaign(broker, cluster, directory, **options)
    finally:
        if asked.log:
            asked.log.write_bytes((directory / "processes.log").read_bytes())


def _print(name: str, report: Report) -> None:
    def text(counts: Mapping[str, int]) -> str:
        return (
            ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            or "none"
        )

    print(f"{name}: {report.events} events in {report.seconds:.0f} s")
    print(f"  killed: {text(report.kills)}; ended by themselves: {text(report.died)}")
    print(f"  at the broker {report.arrived} messages, delivered {report.delivered}")
    print(f"  broken promises: {text(report.broken)}")


if __name__ == "__main__":
    sys.exit(main())
