"""The test project's real server (gunicorn, several processes and threads), as ``make serve`` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testproject import service

ROOT = Path(__file__).parent.parent
PREPARE = """
import django; django.setup()
from testproject import service; service.prepare()
from tests import partitioned
if partitioned.WANTED: partitioned.divide_finely()
"""


@dataclass(frozen=True)
class Server:
    """A running server. Requests raise ``httpx.TransportError`` when the worker that has them is killed."""

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
        """A request with ``key``, ``token`` and ``simulate`` in its headers; the rest is httpx's."""
        own = {
            "Idempotency-Key": key and f'"{key}"',
            "Authorization": token and f"Token {token}",
            "X-Simulate": simulate and json.dumps(simulate),
        }
        named = {name: value for name, value in own.items() if value} | (headers or {})
        return self.http.request(method, path, headers=named, **sent)

    def post(self, path: str, payload: Any = None, **options: Any) -> httpx.Response:
        """POST ``payload`` as JSON; the options are those of ``request``."""
        return self.request("POST", path, **({} if payload is None else {"json": payload}), **options)

    def ledger(self, reference: str) -> int:
        """How many effects with this reference have committed."""
        answer = self.request("GET", "/api/ledger/", params={"reference": reference})
        effects: int = answer.raise_for_status().json()["effects"]
        return effects

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


def prepare_database(database_url: str) -> None:
    """Migrate and seed it, in a process of its own."""
    subprocess.run([sys.executable, "-c", PREPARE], cwd=ROOT, env=os.environ | _environment(database_url), check=True)


def _environment(database_url: str) -> dict[str, str]:
    given = {"DATABASE_URL": database_url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    # A system check refuses SQLite anywhere else.
    return given | ({"DEBUG": "1"} if database_url.startswith("sqlite") else {})


@contextmanager
def running_server(database_url: str, directory: Path, *, workers: int = 2, **environment: str) -> Iterator[Server]:
    """A server on a prepared database with faults switched on, under ``environment``, that serves already."""
    given = _environment(database_url) | {"SIMULATE": "1"} | environment
    # A connection per request: a retry never meets a connection that a killed worker left behind.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    log_file = directory / f"server-{os.urandom(4).hex()}.log"
    with (
        log_file.open("wb") as log,
        service.running(log=log, environ=given, workers=workers) as running,
        httpx.Client(base_url=running.url, timeout=30, limits=limits, trust_env=False) as http,
    ):
        server = Server(running.url, running.gateway_url, database_url, http, log_file, running.gunicorn.pid)
        try:
            server.ledger("-")
        except httpx.HTTPError as error:
            raise RuntimeError(f"The server does not serve:\n{server.log()}") from error
        yield server
