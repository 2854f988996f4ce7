"""A RabbitMQ of the test's own, which may be killed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.private_servers import PrivateServer, free_port

PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def program() -> str | None:
    """Debian's command insists on the system's node; behind it is the one that starts any."""
    return PROGRAM if Path(PROGRAM).exists() and os.geteuid() == 0 else None


class PrivateRabbitMQ(PrivateServer):
    """A node with a directory and ports of its own. What it has confirmed survives a kill."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        environment = os.environ | {
            "RABBITMQ_NODENAME": f"test{port}@localhost",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory / "none"),
            "HOME": str(directory),
        }
        super().__init__((str(program()),), port, directory / "rabbitmq.log", environment)
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"

    def control(self, *arguments: str) -> None:
        subprocess.run([PROGRAM.replace("-server", "ctl"), *arguments], env=self.environment, check=True)
