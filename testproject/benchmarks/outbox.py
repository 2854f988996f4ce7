"""The relay of the outbox: two ways to claim events, and rates to real brokers.

    python -m testproject.benchmarks.outbox claims --seconds 60
    python -m testproject.benchmarks.outbox rate --url amqp://guest:guest@127.0.0.1:5672// --events 20000
    python -m testproject.benchmarks.outbox rate --url kafka://mock --events 20000

Everything uses one database, ``DATABASE_URL``'s, whose outbox is emptied. Each process is named where it matters.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import django
from django.db import connection, connections

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
    parser.add_argument("what", choices=["claims", "rate"])
    parser.add_argument("--url", default="amqp://guest:guest@127.0.0.1:5672//", help="the broker's address")
    parser.add_argument("--seconds", type=float, default=30, help="of each phase of claims")
    parser.add_argument("--events", type=int, default=20_000)
    asked = parser.parse_args()
    django.setup()
    measured = {"claims": claims, "rate": rate}[asked.what](asked)
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
def broker(url: str) -> Iterator[Any]:
    """Yield a relay to the broker."""
    name = f"bench_{uuid.uuid4().hex[:8]}"
    kinds = {"nats": _nats, "kafka": _kafka}
    with kinds.get(url.partition(":")[0], _rabbitmq)(url, name) as relay:
        yield relay


@contextmanager
def _kafka(url: str, name: str) -> Iterator[Any]:
    """With ``kafka://mock``, use librdkafka's mock cluster in this process."""
    from confluent_kafka import Producer

    servers, owner = url.partition("://")[2], None
    if servers == "mock":
        owner = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
        servers = ",".join(f"{node.host}:{node.port}" for node in owner.list_topics(timeout=10).brokers.values())
    yield make_relay(KAFKA, config={"bootstrap.servers": servers, "log_level": 0}, prefix=f"{name}.")
    if owner is not None:
        owner.flush()


@contextmanager
def _rabbitmq(url: str, name: str) -> Iterator[Any]:
    import kombu

    with kombu.Connection(url) as declaring:
        channel: Any = declaring.channel()
        channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
        channel.queue_declare(name, durable=True, auto_delete=False)
        channel.queue_bind(name, name, "#")
        try:
            yield make_relay(RABBITMQ, url=url, exchange=name)
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

    asyncio.run(with_stream("add"))
    try:
        yield make_relay(NATS, servers=url, prefix=f"{name}.")
    finally:
        asyncio.run(with_stream("delete"))


def rate(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the events a second that one relay gets confirmed, from a backlog with 4,999 keys."""
    with broker(asked.url) as relay, connection.cursor() as cursor:
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


if __name__ == "__main__":
    try:
        main()
    finally:
        connections.close_all()
