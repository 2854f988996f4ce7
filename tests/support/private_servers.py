"""Servers of the tests' own, each in a process on a free port: they may be frozen,
killed and started again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import eventually

# for as long as this process runs
_taken: list[socket.socket] = []


def free_port() -> int:
    """One below those that the system gives to whoever asks for any, and that no other
    process of the tests gets, either: nobody has it before it is used.
    """
    while not take_port(port := secrets.choice(range(10_000, 32_768))):
        pass
    return port


def take_port(port: int) -> bool:
    """Whether it was free. The UDP port of the same number tells other processes of the
    tests that it is not any more.
    """
    mark = socket.socket(type=socket.SOCK_DGRAM)
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        mark.bind(("127.0.0.1", port))
        _taken.append(mark)
        return True
    mark.close()
    return False


@dataclass(eq=False)
class PrivateServer:
    """``command`` starts it, and what it prints is added to ``log``. ``user``: who it
    runs as, if not as the tests.

    ``ending``: the signal by which it stops at once, whoever is connected. Everything
    that it starts is in its session, unless it leaves that, and gets the signals that
    it gets.
    """

    command: Sequence[str]
    port: int
    log: Path = Path(os.devnull)
    environment: Mapping[str, str] | None = None
    user: str | None = None
    ending: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Return once it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                user=self.user,
                # who may not look into the directory of the tests
                cwd="/" if self.user else None,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._serves, within=300)

    def _serves(self) -> bool:
        if not self.runs:
            raise RuntimeError(
                f"{self.command[0]} ended:\n{self.log.read_text()[-2000:]}"
            )
        return self.answers()

    def answers(self) -> bool:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1),
        ):
            return True
        return False

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def freeze(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, as by a crash of the machine, but with what the system's cache
        holds.
        """
        if self.runs:
            self.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def stop(self, ending: signal.Signals | None = None) -> None:
        if self.process is not None and self.runs:
            self.process.send_signal(ending or self.ending)
            self.thaw()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()


RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def rabbitmq_program() -> str | None:
    """Debian's command insists on the system's node; behind it is the one that starts
    any.
    """
    return RABBITMQ if Path(RABBITMQ).exists() and os.geteuid() == 0 else None


class PrivateRabbitMQ(PrivateServer):
    """A node with a directory and ports of its own. What it has confirmed survives a
    kill.
    """

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
        super().__init__(
            (str(rabbitmq_program()),), port, directory / "rabbitmq.log", environment
        )
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"

    def control(self, *arguments: str) -> None:
        subprocess.run(
            [RABBITMQ.replace("-server", "ctl"), *arguments],
            env=self.environment,
            check=True,
        )


def nats_program() -> str | None:
    return shutil.which("nats-server", path="/usr/sbin:/sbin") or shutil.which(
        "nats-server"
    )


class PrivateNATS(PrivateServer):
    """A server with a directory and a port of its own. What it has acknowledged
    survives a kill.
    """

    def __init__(self, directory: Path) -> None:
        port = free_port()
        super().__init__(
            (
                str(nats_program()),
                "-js",
                "-a",
                "127.0.0.1",
                "-p",
                str(port),
                "-sd",
                str(directory),
            ),
            port,
        )
        self.url = f"nats://127.0.0.1:{port}"
