"""The relay of the outbox: two ways to claim events, rates to real brokers, and the time from commit to delivery.

    python -m testproject.benchmarks.outbox claims --seconds 60
    python -m testproject.benchmarks.outbox rate --url amqp://guest:guest@127.0.0.1:5672// --events 20000
    python -m testproject.benchmarks.outbox rate --url kafka://mock --events 20000
    python -m testproject.benchmarks.outbox latency --url nats://127.0.0.1:4222 --events 2000

Everything uses one database, ``DATABASE_URL``'s, whose outbox is emptied. Each process is named where it matters.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import quantiles
from typing import Any

import django
from django.db import connection, connections, transaction

RABBITMQ = "django_idempotency.contrib.rabbitmq.RabbitMQPublisher"
NATS = "django_idempotency.contrib.nats.NATSPublisher"
KAFKA = "django_idempotency.contrib.kafka.KafkaPublisher"
CYCLE = 5_000
BATCH = 500
CONTENDER = "bench_outbox_skip_locked"
TABLE = "django_idempotency_outbox_event"

FILL = """
INSERT INTO {table}
    (event_id, publisher, lane, topic, key, payload, content_type, headers, status, attempts, error, created_at)
SELECT gen_random_uuid(), 'default', i %% 64, 'bench', 'key-' || i %% 4999, %s, 'application/json', '{{}}',
    'pending', 0, '', statement_timestamp()
FROM generate_series(1, %s) AS i
"""
# What most outboxes do: lease a batch by an UPDATE of its rows, send, and delete them.
CLAIM = f"""
UPDATE {CONTENDER} SET available_at = statement_timestamp() + interval '15 s' WHERE id IN (
    SELECT id FROM {CONTENDER} WHERE publisher = 'default' AND status = 'pending'
        AND (available_at IS NULL OR available_at < statement_timestamp())
    ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED
) RETURNING id, event_id, topic, key, payload, content_type, headers
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["claims", "rate", "latency"])
    parser.add_argument("--url", default="amqp://guest:guest@127.0.0.1:5672//", help="the broker's address")
    parser.add_argument("--seconds", type=float, default=30, help="of each phase of claims")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=100, help="commits, for latency")
    asked = parser.parse_args()
    django.setup()
    measured = {"claims": claims, "rate": rate, "latency": latency}[asked.what](asked)
    for row in measured:
        print(json.dumps(row), flush=True)


# --- Two claims ------------------------------------------------------------------------------------------------------


def claims(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the events a second that are read and deleted, but not sent: calm, then while a transaction holds xmin."""
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS {CONTENDER}")
        cursor.execute(f"CREATE TABLE {CONTENDER} (LIKE {TABLE} INCLUDING ALL)")
    for held in (False, True):
        yield {"claim": "skip locked", "xmin held": held, **_claimed(CONTENDER, _skip_locked, asked.seconds, held=held)}
        with _lanes() as drain:
            yield {"claim": "lanes", "xmin held": held, **_claimed(TABLE, drain, asked.seconds, held=held)}


def _claimed(table: str, drain: Callable[[], int], seconds: float, *, held: bool) -> dict[str, Any]:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {table}")
        cursor.execute(f"VACUUM ANALYZE {table}")
    rates = []
    with holding_xmin() if held else nullcontext():
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            fill(table, CYCLE)
            begun = time.perf_counter()
            assert drain() == CYCLE
            rates.append(CYCLE / (time.perf_counter() - begun))
        dead = dead_tuples(table)
    part = max(1, len(rates) // 5)
    return {
        "events": len(rates) * CYCLE,
        "first fifth /s": round(sum(rates[:part]) / part),
        "last fifth /s": round(sum(rates[-part:]) / part),
        "dead tuples": dead,
    }


def fill(table: str, count: int, using: str = "default") -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(FILL.format(table=table), [b"x" * 200, count])


def _skip_locked() -> int:
    done = 0
    with connection.cursor() as cursor:
        while True:
            cursor.execute(CLAIM)
            if not (rows := cursor.fetchall()):
                return done
            cursor.execute(f"DELETE FROM {CONTENDER} WHERE id = ANY(%s)", [[row[0] for row in rows]])
            done += len(rows)


@contextmanager
def _lanes() -> Iterator[Callable[[], int]]:
    relay = make_relay("django_idempotency.contrib.outbox.publishers.local.LocalPublisher", handler=lambda event: None)

    def drain() -> int:
        done = 0
        while count := relay.step():
            done += count
        return done

    yield drain
    relay.lanes.leave()


@contextmanager
def holding_xmin() -> Iterator[None]:
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT pg_current_xact_id()")
        yield
        cursor.execute("ROLLBACK")
    other.close()


def dead_tuples(table: str, using: str = "default") -> int:
    with connections[using].cursor() as cursor:
        cursor.execute("CREATE EXTENSION IF NOT EXISTS pgstattuple")
        cursor.execute("SELECT dead_tuple_count FROM pgstattuple(%s)", [table])
        return int(cursor.fetchone()[0])


# --- Brokers ---------------------------------------------------------------------------------------------------------


def make_relay(backend: str, *, using: str | None = None, **options: Any) -> Any:
    from django.test import override_settings

    from django_idempotency.contrib.outbox.relay import EventRelay

    outbox = {"PUBLISHERS": {"default": {"BACKEND": backend, "OPTIONS": options}}, "BATCH": BATCH}
    override_settings(IDEMPOTENCY={"OUTBOX": outbox}).enable()
    return EventRelay("default", using=using)


@contextmanager
def broker(url: str) -> Iterator[tuple[Any, Callable[[Callable[[str], None], threading.Event], None]]]:
    """Yield a relay to the broker, and a function that consumes what it delivers until told to stop."""
    name = f"bench_{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        kinds = {"nats": _nats, "kafka": _kafka}
        kind = kinds.get(url.partition(":")[0], _rabbitmq)
        yield stack.enter_context(kind(url, name))


@contextmanager
def _kafka(url: str, name: str) -> Iterator[Any]:
    """With ``kafka://mock``, use librdkafka's mock cluster in this process."""
    from confluent_kafka import Consumer, Producer

    servers, owner = url.partition("://")[2], None
    if servers == "mock":
        owner = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
        servers = ",".join(f"{node.host}:{node.port}" for node in owner.list_topics(timeout=10).brokers.values())

    def consume(hear: Callable[[str], None], stop: threading.Event) -> None:
        consumer = Consumer({"bootstrap.servers": servers, "group.id": name, "auto.offset.reset": "earliest"})
        consumer.subscribe([f"{name}.charge.created"])
        while not stop.is_set():
            message = consumer.poll(0.2)
            if message is not None and not message.error():
                hear(_header(message, "ce_id"))
        consumer.close()

    yield make_relay(KAFKA, config={"bootstrap.servers": servers, "log_level": 0}, prefix=f"{name}."), consume
    if owner is not None:
        owner.flush()


def _header(message: Any, name: str) -> str:
    return str(dict(message.headers())[name], "ascii")


@contextmanager
def _rabbitmq(url: str, name: str) -> Iterator[Any]:
    import kombu

    with kombu.Connection(url) as declaring:
        channel: Any = declaring.channel()
        channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
        channel.queue_declare(name, durable=True, auto_delete=False)
        channel.queue_bind(name, name, "#")

        def consume(hear: Callable[[str], None], stop: threading.Event) -> None:
            with kombu.Connection(url) as consuming:
                channel: Any = consuming.channel()
                channel.basic_consume(name, no_ack=True, callback=lambda got: hear(got.properties["message_id"]))
                while not stop.is_set():
                    try:
                        consuming.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

        try:
            yield (
                make_relay(RABBITMQ, url=url, exchange=name),
                consume,
            )
        finally:
            channel.queue_delete(name)
            channel.exchange_delete(name)


@contextmanager
def _nats(url: str, name: str) -> Iterator[Any]:
    import asyncio

    import nats

    async def with_stream(act: str) -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        await (stream.add_stream(name=name, subjects=[f"{name}.>"]) if act == "add" else stream.delete_stream(name))
        await client.close()

    async def listen(hear: Callable[[str], None], stop: threading.Event) -> None:
        client = await nats.connect(url)

        async def handle(message: Any) -> None:
            hear(message.headers["Nats-Msg-Id"])

        await client.jetstream().subscribe(f"{name}.>", cb=handle)
        while not stop.is_set():
            await asyncio.sleep(0.1)
        await client.close()

    asyncio.run(with_stream("add"))
    try:
        relay = make_relay(NATS, servers=url, prefix=f"{name}.")
        yield relay, lambda hear, stop: asyncio.run(listen(hear, stop))
    finally:
        asyncio.run(with_stream("delete"))


def rate(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the events a second that one relay gets confirmed, from a backlog with 4,999 keys."""
    with broker(asked.url) as (relay, _consume), connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLE}")
        fill(TABLE, BATCH)
        while relay.step():  # warms up
            pass
        fill(TABLE, asked.events)
        begun = time.perf_counter()
        while relay.step():
            pass
        took = time.perf_counter() - begun
        assert relay.published == asked.events + BATCH
        relay.lanes.leave()
        relay.publisher.close()
        yield {"broker": asked.url.partition(":")[0], "events": asked.events, "events/s": round(asked.events / took)}


def latency(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds from COMMIT's return to the consumer. Publisher, relay and consumer are threads here."""
    from django_idempotency.contrib.outbox.publishing import publish

    committed: dict[str, float] = {}
    delivered: dict[str, float] = {}
    stop = threading.Event()

    def hear(id: str) -> None:
        delivered.setdefault(id, time.monotonic())

    with broker(asked.url) as (relay, consume):
        threads = [
            threading.Thread(target=consume, args=(hear, stop)),
            threading.Thread(target=relay.run, args=(stop,)),
        ]
        for thread in threads:
            thread.start()
        time.sleep(2)
        due = time.monotonic()
        for number in range(asked.events):
            due += 1 / asked.per_second
            time.sleep(max(0, due - time.monotonic()))
            with transaction.atomic():
                id = publish("charge.created", {"amount": 1}, key=f"key-{number % 97}")
            committed[str(id)] = time.monotonic()
        deadline = time.monotonic() + 30
        while len(delivered) < asked.events and time.monotonic() < deadline:
            time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
    yield {"broker": asked.url.partition(":")[0], **_spread([delivered[id] - committed[id] for id in committed])}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    parts = quantiles(seconds, n=100)
    named = {"p50": parts[49], "p95": parts[94], "p99": parts[98], "longest": max(seconds)}
    return {"events": len(seconds), **{f"{name} ms": round(value * 1000, 1) for name, value in named.items()}}


if __name__ == "__main__":
    try:
        main()
    finally:
        connections.close_all()
