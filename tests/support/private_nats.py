"""A NATS server of the test's own, with JetStream, which may be killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.pgbouncer import free_port
from tests.support.waiting import eventually


def program() -> str | None:
    return shutil.which("nats-server", path="/usr/sbin:/sbin") or shutil.which("nats-server")


class PrivateNATS:
    """A server with a directory and a port of its own. What it has acknowledged survives a kill."""

    def __init__(self, directory: Path) -> None:
        self.port, self.directory = free_port(), directory
        self.url = f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.directory)]
        self.process = subprocess.Popen(
            [str(program()), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        eventually(self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, "nats-server ended"
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
