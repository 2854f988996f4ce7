"""Kafka as librdkafka simulates it: a cluster inside this process that others reach over TCP, without a disk."""

from __future__ import annotations

from collections.abc import Iterable


class MockKafka:
    """A mock cluster that lives as long as the producer that made it. A topic has four partitions."""

    def __init__(self) -> None:
        from confluent_kafka import Producer

        self.producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 2})
        brokers = self.producer.list_topics(timeout=10).brokers.values()
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def publish(
        self,
        *ids: str | None,
        partition: int | None = None,
        body: bytes = b"{}",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        for id in ids:
            place = {} if partition is None else {"partition": partition}
            named = [] if id is None else [("ce_id", id)]
            self.producer.produce("topic", body, key=id, headers=[*named, *headers], **place)
        assert self.producer.flush(20) == 0
