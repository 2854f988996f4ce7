"""A game day's ground: the service under its clients, maintenance beside it, a real
Prometheus, and what is noted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import yaml

from tests.gameday.rules import PACE, quicker
from tests.support.private_servers import PrivateServer, free_port
from tests.support.servers import Server, running_server

RULES = Path(__file__).parents[2] / "docs" / "monitoring" / "alerts.yml"
SETTINGS = "tests.gameday.settings"
TRIES = 8  # of a client


# --- Prometheus -----------------------------------------------------------------------


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes ``target`` and evaluates the rules."""
    (directory / "alerts.yml").write_text(yaml.safe_dump(quicker(RULES.read_text())))
    scrape = {
        "job_name": "shop",
        "metrics_path": "/metrics/",
        "static_configs": [{"targets": [target], "labels": {"environment": "gameday"}}],
    }
    timing = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config = {
        "global": timing,
        "rule_files": ["alerts.yml"],
        "scrape_configs": [scrape],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = (
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--query.lookback-delta={300 // PACE}s",
    )
    with PrivateServer(
        ("prometheus", *options), port, directory / "prometheus.log"
    ).running():
        yield f"http://127.0.0.1:{port}"


# --- What is noted --------------------------------------------------------------------


@dataclass
class Notes:
    """Which alerts fired after which event, and what the admin's strip said then."""

    url: str
    strip: Callable[[], str]
    events: list[dict[str, Any]] = field(default_factory=list)
    firing: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def event(self, what: str) -> dict[str, Any]:
        self.events.append(
            {"what": what, "at": time.monotonic(), "fired": [], "clients": {}}
        )
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
        return self.events[-1]

    def watch(self) -> None:
        with httpx.Client(trust_env=False, timeout=5) as http:
            while not self.stopped.wait(0.5):
                with suppress(httpx.HTTPError):
                    self._note(
                        http.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"]
                    )

    def _note(self, alerts: list[dict[str, Any]]) -> None:
        firing = {
            alert["labels"]["alertname"]
            for alert in alerts
            if alert["state"] == "firing"
        }
        for name in sorted(firing - self.firing.keys()):
            event = self.events[-1]
            after = time.monotonic() - event["at"]
            self.firing[name] = note = {
                "alert": name,
                "after": round(after, 1),
                "strip": self.strip(),
            }
            event["fired"].append(note)
            print(f"    {after:5.1f} s: {name} ({note['strip']})", flush=True)
        for name in self.firing.keys() - firing:
            note = self.firing.pop(name)
            note["resolved"] = (
                round(time.monotonic() - self.events[-1]["at"], 1),
                self.events[-1]["what"],
            )
            print(f"    resolved: {name}", flush=True)


def seen_by_operators(url: str) -> str:
    """What the strip on top of the admin says, by the same question; in a session of
    its own, which may fail.
    """
    late = "status IN ('started', 'processing') AND locked_until < now()"
    counts = f"count(*) FILTER (WHERE {late}), count(*) FILTER (WHERE on_hold)"
    try:
        with psycopg.connect(
            url, connect_timeout=1, options="-c statement_timeout=1000"
        ) as connection:
            row = connection.execute(
                f"SELECT {counts} FROM django_idempotency_record"
            ).fetchone()
    except psycopg.Error:
        return "the database did not respond"
    assert row is not None
    return f"{row[0]} stuck, {row[1]} on hold"


# --- Clients and maintenance ----------------------------------------------------------


class Clients:
    """Five charges a second, each tried ``TRIES`` times until it has a response."""

    def __init__(self, server: Server, notes: Notes) -> None:
        self.server, self.notes = server, notes
        self.stopped = threading.Event()

    def run(self) -> None:
        with ThreadPoolExecutor(32) as pool:
            while not self.stopped.wait(0.2):
                pool.submit(self.charge)

    def charge(
        self,
        path: str = "/api/charges/",
        simulate: dict[str, Any] | None = None,
        tries: int = TRIES,
    ) -> None:
        key, faults = uuid4().hex, simulate
        payload = {"amount": 1, "currency": "EUR", "reference": key}
        for _try in range(tries):
            try:
                status: object = self.server.post(
                    path, payload, key=key, simulate=faults, timeout=4
                ).status_code
            except httpx.HTTPError as error:
                status = type(error).__name__
            seen = self.notes.events[-1]["clients"]
            seen[status] = seen.get(status, 0) + 1
            if status in (200, 201) or self.stopped.is_set():
                return
            faults = None
            time.sleep(1)


class Maintenance:
    """Cleaning up and reaping, as often as every three minutes."""

    def __init__(self, url: str) -> None:
        self.environment = os.environ | {
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": SETTINGS,
        }
        self.stopped = threading.Event()

    def run(self) -> None:
        script = (
            "import django, sys; django.setup()\n"
            "from django.db import Error, connections\n"
            "from django_idempotency.maintenance import cleanup, reap\n"
            "for _line in sys.stdin:\n"
            "    try: reap(max_seconds=5), cleanup(pause=0, max_seconds=5)\n"
            "    except Error: connections.close_all()\n"
        )
        command = [sys.executable, "-c", script]
        with subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            while not self.stopped.wait(180 / PACE):
                process.stdin.write("\n")
                process.stdin.flush()


# --- All of it ------------------------------------------------------------------------


@dataclass
class Ground:
    server: Server
    notes: Notes
    clients: Clients
    maintenance: Maintenance
    service: ExitStack  # to be closed where the service is to end before the rest


@contextmanager
def ground(url: str, directory: Path) -> Iterator[Ground]:
    """The service on a prepared database."""
    with ExitStack() as stack:
        metrics = directory / "metrics"
        metrics.mkdir()
        given = {
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        }
        service = stack.enter_context(ExitStack())
        server = service.enter_context(running_server(url, directory, **given))
        watched = stack.enter_context(
            prometheus(server.url.removeprefix("http://"), directory)
        )
        notes = Notes(watched, lambda: seen_by_operators(url))
        there = Ground(server, notes, Clients(server, notes), Maintenance(url), service)
        notes.event("The service runs, without a relay for its outbox")
        for run, stopped in (
            (notes.watch, notes.stopped),
            (there.clients.run, there.clients.stopped),
            (there.maintenance.run, there.maintenance.stopped),
        ):
            threading.Thread(target=run, daemon=True).start()
            stack.callback(stopped.set)
        yield there
