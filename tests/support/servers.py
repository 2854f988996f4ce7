"""The test project's real server (gunicorn, several processes and threads), as ``make
serve`` runs it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from testproject import service
from tests.support import distributed

CORE = "tests.support.settings.core"  # where the wings are deleted
SETTINGS = (
    CORE if os.environ.get("DJANGO_SETTINGS_MODULE") == CORE else "testproject.settings"
)
ROOT = Path(__file__).parents[2]
# One connection per request, so that a retry never meets one that a killed worker has
# closed meanwhile.
NO_KEEPALIVE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
# seconds in which even a machine with much else to do has imported the project, and
# answered
BUSY = 120
PRELOADED = {"GUNICORN_CMD_ARGS": "--preload"}
PREPARE = """
import django; django.setup()
from testproject import service; service.prepare()
from tests.support import distributed, partitioned
if partitioned.WANTED: partitioned.divide_finely()
if distributed.WANTED: distributed.distribute()
"""


@dataclass(frozen=True)
class Server:
    """A running server. Requests raise ``httpx.TransportError`` if the worker that has
    them is killed.
    """

    url: str
    gateway_url: str
    database_url: str
    http: httpx.Client
    log_file: Path
    pid: int  # gunicorn's: the workers are its children

    def request(
        self,
        method: str,
        path: str,
        *,
        key: str | None = None,
        token: str | None = "alice-token",
        simulate: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        **sent: Any,
    ) -> httpx.Response:
        """A request with ``key``, ``token`` and ``simulate`` in its headers; the rest
        is httpx's.
        """
        own = {
            "Idempotency-Key": key and f'"{key}"',
            "Authorization": token and f"Token {token}",
            "X-Simulate": simulate and json.dumps(simulate),
        }
        named = {name: value for name, value in own.items() if value} | (headers or {})
        return self.http.request(method, path, headers=named, **sent)

    def post(self, path: str, payload: Any = None, **options: Any) -> httpx.Response:
        """POST ``payload`` as JSON; the options are those of ``request``."""
        return self.request(
            "POST", path, **({} if payload is None else {"json": payload}), **options
        )

    @contextmanager
    def sent(self, path: str, body: bytes, *headers: bytes) -> Iterator[socket.socket]:
        """A connection on which a POST of JSON was sent as it stands, by no client
        library.
        """
        address = urlsplit(self.url)
        head = (
            *(
                f"POST {path} HTTP/1.1".encode(),
                f"Host: {address.netloc}".encode(),
                b"Connection: close",
            ),
            *(b"Authorization: Token alice-token", b"Content-Type: application/json"),
            b"Content-Length: %d" % len(body),
        )
        with socket.create_connection(
            (address.hostname, address.port), timeout=BUSY
        ) as wire:
            wire.sendall(b"\r\n".join([*head, *headers, b"", body]))
            yield wire

    def ledger(self, reference: str) -> int:
        """How many effects with this reference have committed."""
        answer = self.request("GET", "/api/ledger/", params={"reference": reference})
        effects: int = answer.raise_for_status().json()["effects"]
        return effects

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def workers(self) -> list[int]:
        return children(self.pid)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def prepare_database(database_url: str) -> None:
    """Migrate and seed it, in a process of its own."""
    subprocess.run(
        [sys.executable, "-c", PREPARE],
        cwd=ROOT,
        env=os.environ | _environment(database_url),
        check=True,
    )


def _environment(database_url: str) -> dict[str, str]:
    given = {
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "OPENAPI": "0",
    }
    given |= {"STORE": "citus"} if distributed.STORE_WANTED else {}
    # Without DEBUG, a system check refuses SQLite.
    return given | ({"DEBUG": "1"} if database_url.startswith("sqlite") else {})


def unless_in_flight(response: httpx.Response) -> httpx.Response | None:
    return None if response.status_code == 409 else response


@contextmanager
def running_server(
    database_url: str,
    directory: Path,
    *,
    workers: int = 2,
    code: Path | None = None,
    **environment: str,
) -> Iterator[Server]:
    """A server on a prepared database with faults switched on, under ``environment``,
    that serves already.

    It loads the project before it forks its workers: they start at once, and again
    after a kill. ``GUNICORN_CMD_ARGS=""`` lets each worker load it. It describes no
    operations, unless ``OPENAPI="1"``.
    ``code``: the directory of another version of the package and the test project.
    """
    given = _environment(database_url) | {"SIMULATE": "1"} | PRELOADED | environment
    log_file = directory / f"server-{os.urandom(4).hex()}.log"
    with (
        log_file.open("wb") as log,
        service.running(log=log, environ=given, workers=workers, code=code) as running,
        httpx.Client(
            base_url=running.url, timeout=BUSY, limits=NO_KEEPALIVE, trust_env=False
        ) as http,
    ):
        server = Server(
            running.url,
            running.gateway_url,
            database_url,
            http,
            log_file,
            running.gunicorn.pid,
        )
        try:
            server.request(
                "GET", "/api/ledger/", params={"reference": "-"}
            ).raise_for_status()
        except httpx.HTTPError as error:
            raise RuntimeError(f"The server does not serve:\n{server.log()}") from error
        yield server


@contextmanager
def running_uvicorn(
    database_url: str, directory: Path, **environment: str
) -> Iterator[Server]:
    """The test project under a real uvicorn, on a prepared database."""
    given = {"DATABASE_URL": database_url, "SIMULATE": "1", "DEBUG": "1"} | environment
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        command = [
            "-m",
            "uvicorn",
            "testproject.asgi:application",
            "--fd",
            f"{listener.fileno()}",
        ]
        with _listening(
            listener, [sys.executable, *command], database_url, directory, given
        ) as server:
            yield server


@contextmanager
def _listening(
    listener: socket.socket,
    command: list[str],
    database_url: str,
    directory: Path,
    environment: dict[str, str],
) -> Iterator[Server]:
    log_file = directory / "log"
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            pass_fds=[listener.fileno()],
            stdout=log,
            stderr=log,
        ) as process,
        httpx.Client(
            base_url=url, timeout=BUSY, limits=NO_KEEPALIVE, trust_env=False
        ) as http,
    ):
        try:
            yield Server(url, "", database_url, http, log_file, process.pid)
        finally:
            process.terminate()
