"""Kafka as librdkafka simulates it: a cluster inside this process that others reach
over TCP, without a disk.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.private_servers import PrivateServer


class MockKafka:
    """A mock cluster that lives as long as the producer that made it. A topic has four
    partitions.
    """

    def __init__(self) -> None:
        from confluent_kafka import Producer

        self.producer = Producer(
            {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 2}
        )
        brokers = self.producer.list_topics(timeout=60).brokers.values()
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
            self.producer.produce(
                "topic", body, key=id, headers=[*named, *headers], **place
            )
        assert self.producer.flush(60) == 0


def all_of(topic: str) -> list[Any]:
    """What a consumer assigns to itself to read a topic from its beginning, without a
    group that may be slow to form.
    """
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition

    return [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(4)]


class PrivateKafka(PrivateServer):
    """A mock cluster in a process of its own, which may be frozen. ``url``: where its
    broker listens, once it runs.
    """

    url: str

    def __init__(self, directory: Path) -> None:
        super().__init__(
            (sys.executable, "-m", "tests.support.mock_kafka"),
            0,
            directory / "kafka.log",
        )

    def answers(self) -> bool:
        self.url = self.log.read_text().strip()
        return bool(self.url)


if __name__ == "__main__":
    cluster = MockKafka()
    print(cluster.servers, flush=True)
    threading.Event().wait()
