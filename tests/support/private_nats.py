"""A NATS server of the test's own, with JetStream, which may be killed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.private_servers import PrivateServer, free_port


def program() -> str | None:
    return shutil.which("nats-server", path="/usr/sbin:/sbin") or shutil.which("nats-server")


class PrivateNATS(PrivateServer):
    """A server with a directory and a port of its own. What it has acknowledged survives a kill."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        super().__init__((str(program()), "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(directory)), port)
        self.url = f"nats://127.0.0.1:{port}"
