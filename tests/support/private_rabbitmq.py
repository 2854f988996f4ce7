"""A RabbitMQ of the test's own, which may be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.support.pgbouncer import free_port
from tests.support.waiting import eventually

PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def program() -> str | None:
    """Debian's command insists on the system's node; behind it is the one that starts any."""
    return PROGRAM if Path(PROGRAM).exists() and os.geteuid() == 0 else None


class PrivateRabbitMQ:
    """A node with a directory and ports of its own. What it has confirmed survives a kill."""

    def __init__(self, directory: Path) -> None:
        self.port, distribution = free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self.log = directory / "rabbitmq.log"
        self.environment = os.environ | {
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory / "none"),
            "HOME": str(directory),
        }

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(program())], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        eventually(self._listens, within=120, every=0.2)

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(self.log.read_text())
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """At once, as by a crash of the machine, but with what the system's cache holds."""
        if self.process.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.process.wait()
