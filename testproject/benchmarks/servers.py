"""A contender's service as it would run in production: gunicorn, on a database of its
own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from testproject.benchmarks import contenders, environments, processes
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.private_redis import Redis

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".benchmarks"
PATIENCE = 30
PATH = "/effects/"
OPTIONS = [
    "testproject.benchmarks.project.wsgi",
    *("--worker-class", "gthread", "--workers", "1", "--graceful-timeout", "3"),
    *("--log-level", "warning", "--no-control-socket"),
    *("--keep-alive", "60"),  # seconds; an open loop leaves connections idle for long
]
BODY = '{"amount": 4200, "currency": "eur", "reference": "order 4711"}'


class DoesNotWork(Exception):
    """Its message is what the contender says."""


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    gunicorns: Sequence[subprocess.Popen[bytes]]
    log: Path

    @property
    def title(self) -> str:
        return contenders.load(self.name).title

    @property
    def database(self) -> str:
        return database(self.name)

    def cpu(self) -> float:
        """Return the seconds of processor time of its workers."""
        return sum(
            processes.seconds(processes.family(gunicorn.pid)[1:])
            for gunicorn in self.gunicorns
        )

    def post(
        self, key: str, connection: HTTPConnection | None = None
    ) -> tuple[int, bytes]:
        if connection is None:
            with closing(
                HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            ) as connection:
                return self.post(key, connection)
        connection.request(
            "POST",
            PATH,
            BODY,
            {"Content-Type": "application/json", "Idempotency-Key": key},
        )
        response = connection.getresponse()
        return response.status, response.read()


def database(name: str) -> str:
    return f"benchmark_{name}"


def prepare(name: str, cluster: Cluster, redis: Redis | None, directory: Path) -> None:
    """Prepare its environment and its tables. Raise ``CannotInstall`` or
    ``DoesNotWork`` if that fails.
    """
    if contenders.load(name).redis and redis is None:
        raise DoesNotWork("There is no Redis.")
    _python(name, directory)
    cluster.create(database(name))
    make_tables(name, cluster, database(name), redis, directory)


def make_tables(
    name: str,
    cluster: Cluster,
    database: str,
    redis: Redis | None = None,
    directory: Path = DIRECTORY,
) -> None:
    result = subprocess.run(
        [_python(name, directory), "-m", "testproject.benchmarks.project.prepare"],
        cwd=ROOT,
        env=environ(name, cluster, redis, database),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise DoesNotWork(result.stderr.strip().splitlines()[-1])


@contextmanager
def tables(cluster: Cluster, *databases: str) -> Iterator[None]:
    """Have databases with this package's tables, for the block."""
    try:
        for database in databases:
            cluster.create(database)
            make_tables("atomic", cluster, database)
        yield
    finally:
        for database in databases:
            cluster.drop(database)


def figures(
    module: str,
    order: object,
    cluster: Cluster,
    database: str,
    contender: str = "atomic",
) -> Any:
    """Return what ``module`` prints when run on ``database`` in its own process, a
    project with this package or with another ``contender``.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(order)],
        cwd=ROOT,
        env=environ(contender, cluster, None, database),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


@contextmanager
def running(
    name: str,
    cluster: Cluster,
    redis: Redis | None,
    directory: Path,
    *,
    workers: int = 2,
    threads: int = 8,
) -> Iterator[Server]:
    """Run a contender's service. Raise ``DoesNotWork`` if it does not answer a request.

    Each worker has a listener and a master of its own. With a shared listener, a worker
    that is awake would take most of the connections, and the other one's processor
    would idle.
    """
    command = [
        _python(name, directory),
        "-m",
        "gunicorn",
        *OPTIONS,
        "--threads",
        f"{threads}",
    ]
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
        output = stack.enter_context(log.open("wb"))
        listeners = [stack.enter_context(_door())]
        port = listeners[0].getsockname()[1]
        listeners += [stack.enter_context(_door(port)) for _ in range(workers - 1)]
        env = environ(name, cluster, redis, database(name))
        gunicorns = [
            stack.enter_context(
                _gunicorn(command, cwd=ROOT, env=env, listener=listener, output=output)
            )
            for listener in listeners
        ]
        for listener in listeners:
            listener.close()
        server = Server(name, port, gunicorns, log)
        _wait_for(server)
        yield server


def _door(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=2048, reuse_port=True)


@contextmanager
def _gunicorn(
    command: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    listener: socket.socket,
    output: object,
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*command, "--bind", f"fd://{listener.fileno()}"],
        cwd=cwd,
        env=env,
        pass_fds=[listener.fileno()],
        stdout=output,
        stderr=subprocess.STDOUT,  # type: ignore[call-overload]
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()


def _wait_for(server: Server) -> None:
    """Wait until it has answered a request, and so has done what it does only once."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            status, body = server.post(str(uuid.uuid4()))
            break
        except OSError:
            if time.monotonic() > deadline or any(
                gunicorn.poll() is not None for gunicorn in server.gunicorns
            ):
                raise DoesNotWork(_last_line(server.log)) from None
            time.sleep(0.05)
    if status >= 500:
        raise DoesNotWork(f"{status}: {_last_line(server.log) or body[:200].decode()}")


def _last_line(log: Path) -> str:
    return "".join(log.read_text(errors="replace").strip().splitlines()[-1:])


def _python(name: str, directory: Path) -> str:
    return environments.python(contenders.load(name), directory / "environments")


def environ(
    name: str, cluster: Cluster, redis: Redis | None, database: str
) -> dict[str, str]:
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "testproject.benchmarks.project.settings",
        "CONTENDER": name,
        "PYTHONPATH": str(ROOT),
        "REDIS_URL": redis.url if redis else "",
        **cluster.environ(database),
    }
