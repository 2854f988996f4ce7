"""librdkafka's mock cluster in a process of its own, which may be frozen. Killed, it would forget everything."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.support.mock_kafka import MockKafka
from tests.support.private_servers import PrivateServer


class PrivateKafka(PrivateServer):
    """``url``: where its broker listens, once it has started."""

    url: str

    def __init__(self, directory: Path) -> None:
        super().__init__((sys.executable, "-m", "tests.support.private_kafka"), 0, directory / "kafka.log")

    def answers(self) -> bool:
        self.url = self.log.read_text().strip()
        return bool(self.url)


if __name__ == "__main__":
    cluster = MockKafka()
    print(cluster.servers, flush=True)
    threading.Event().wait()
