"""A game day: break the service in several ways, and note which alerts a real Prometheus raises, and when.

``DATABASE_URL=postgres://… python -m tests.gameday``; takes about fifteen minutes, and needs ``prometheus``. The alert
rules are those of the documentation. So that nobody waits for hours, every duration in them is divided by ``PACE``, as
are the intervals of scrapes and of rules. The database gets a new one beside it, ``gameday``, for as long as this runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import yaml

from tests.gameday.rules import PACE, quicker
from tests.support.servers import Server, prepare_database, running_server

RULES = Path(__file__).parents[2] / "docs" / "monitoring" / "alerts.yml"
NAME = "gameday"


# --- Prometheus -------------------------------------------------------------------------------------------------------


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes ``target`` and evaluates the rules."""
    (directory / "alerts.yml").write_text(yaml.safe_dump(quicker(RULES.read_text())))
    scrape = {
        "job_name": "shop",
        "metrics_path": "/metrics/",
        "static_configs": [{"targets": [target], "labels": {"environment": "gameday"}}],
    }
    timing = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": timing, "rule_files": ["alerts.yml"], "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = (
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        f"--query.lookback-delta={300 // PACE}s",
    )
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


# --- What is noted ---------------------------------------------------------------------------------------------------


@dataclass
class Notes:
    """Which alerts fired after which event, and what the admin's strip said then."""

    url: str
    strip: Callable[[], str]
    events: list[dict[str, Any]] = field(default_factory=list)
    firing: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def event(self, what: str) -> dict[str, Any]:
        self.events.append({"what": what, "at": time.monotonic(), "fired": [], "clients": {}})
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
        return self.events[-1]

    def watch(self) -> None:
        with httpx.Client(trust_env=False, timeout=5) as http:
            while not self.stopped.wait(0.5):
                with suppress(httpx.HTTPError):
                    self._note(http.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"])

    def _note(self, alerts: list[dict[str, Any]]) -> None:
        firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
        for name in sorted(firing - self.firing.keys()):
            event = self.events[-1]
            after = time.monotonic() - event["at"]
            self.firing[name] = note = {"alert": name, "after": round(after, 1), "strip": self.strip()}
            event["fired"].append(note)
            print(f"    {after:5.1f} s: {name} ({note['strip']})", flush=True)
        for name in self.firing.keys() - firing:
            note = self.firing.pop(name)
            note["resolved"] = round(time.monotonic() - self.events[-1]["at"], 1), self.events[-1]["what"]
            print(f"    resolved: {name}", flush=True)


def seen_by_operators(url: str) -> str:
    """What the strip on top of the admin says, by the same question; in a session of its own, which may fail."""
    late = "status IN ('started', 'processing') AND locked_until < now()"
    counts = f"count(*) FILTER (WHERE {late}), count(*) FILTER (WHERE on_hold)"
    try:
        with psycopg.connect(url, connect_timeout=1, options="-c statement_timeout=1000") as connection:
            row = connection.execute(f"SELECT {counts} FROM django_idempotency_record").fetchone()
    except psycopg.Error:
        return "the database did not answer"
    assert row is not None
    return f"{row[0]} stuck, {row[1]} on hold"


# --- Clients, operators, faults --------------------------------------------------------------------------------------


class Clients:
    """Five charges a second, each retried until it has an answer."""

    def __init__(self, server: Server, notes: Notes) -> None:
        self.server, self.notes = server, notes
        self.stopped = threading.Event()

    def run(self) -> None:
        with ThreadPoolExecutor(32) as pool:
            while not self.stopped.wait(0.2):
                pool.submit(self.charge)

    def charge(self, path: str = "/api/charges/", simulate: dict[str, Any] | None = None, tries: int = 8) -> None:
        key, faults = uuid4().hex, simulate
        payload = {"amount": 1, "currency": "EUR", "reference": key}
        for _try in range(tries):
            try:
                status: object = self.server.post(path, payload, key=key, simulate=faults, timeout=4).status_code
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
        self.environment = os.environ | {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.gameday.settings"}
        self.stopped = threading.Event()

    def run(self) -> None:
        script = (
            "import django, sys; django.setup()\n"
            "from django_idempotency.maintenance import cleanup, reap\n"
            "for _line in sys.stdin: reap(max_seconds=5), cleanup(pause=0, max_seconds=5)\n"
        )
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            while not self.stopped.wait(180 / PACE):
                process.stdin.write("\n")
                process.stdin.flush()


def workers(server: Server) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def freeze_one(clients: Clients, seconds: float) -> None:
    """Stop a worker in the middle of runs in lease mode, until their leases have run out and retries have run."""
    with ThreadPoolExecutor(8) as pool:
        for _order in range(8):
            pool.submit(clients.charge, "/async/orders/", {"delay_ms": 2000}, 20)
        time.sleep(1)
        frozen = workers(clients.server)[0]
        os.kill(frozen, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(frozen, signal.SIGCONT)


@contextmanager
def locked_table(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE django_idempotency_record IN ACCESS EXCLUSIVE MODE")
        yield
        connection.rollback()


# --- The day ---------------------------------------------------------------------------------------------------------


def day(url: str, directory: Path) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        metrics = directory / "metrics"
        metrics.mkdir()
        given = {"DJANGO_SETTINGS_MODULE": "tests.gameday.settings", "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        service = stack.enter_context(ExitStack())
        server = service.enter_context(running_server(url, directory, **given))
        notes = Notes(
            stack.enter_context(prometheus(server.url.removeprefix("http://"), directory)),
            lambda: seen_by_operators(url),
        )
        clients, maintenance = Clients(server, notes), Maintenance(url)
        notes.event("The service runs, without a relay for its outbox")
        for run, stopped in (
            (notes.watch, notes.stopped),
            (clients.run, clients.stopped),
            (maintenance.run, maintenance.stopped),
        ):
            threading.Thread(target=run, daemon=True).start()
            stack.callback(stopped.set)
        time.sleep(75)

        notes.event("A worker is killed every 4 s, in the middle of a charge; clients retry")
        for _kill in range(28):
            threading.Thread(target=clients.charge, kwargs={"simulate": {"kill": "after"}}, daemon=True).start()
            time.sleep(4)
        notes.event("That ends")
        time.sleep(60)

        notes.event("A worker is frozen for 16 s, in the middle of runs in lease mode")
        freeze_one(clients, 16)
        time.sleep(20)

        notes.event("A worker is killed in the middle of a payout with on_crash=hold, and the client retries")
        clients.charge("/api/payouts/", {"kill": "before"}, tries=10)
        time.sleep(30)

        notes.event("Clean-up and reaper are stopped; three charges are killed, and never retried")
        maintenance.stopped.set()
        for _kill in range(3):
            clients.charge(simulate={"kill": "after"}, tries=1)
            time.sleep(2)
        time.sleep(400)

        notes.event("The table is locked (ACCESS EXCLUSIVE)")
        with locked_table(url):
            time.sleep(60)
        notes.event("The lock ends")
        time.sleep(30)

        clients.stopped.set()
        time.sleep(5)
        notes.event("The service is stopped")
        service.close()
        time.sleep(60)
        notes.stopped.set()
        return notes.events


def main() -> None:
    base = os.environ["DATABASE_URL"].rpartition("/")[0]
    with psycopg.connect(f"{base}/postgres", autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {NAME}")
        server.execute(f"CREATE DATABASE {NAME}")
        try:
            with tempfile.TemporaryDirectory() as directory:
                prepare_database(f"{base}/{NAME}")
                print(json.dumps(day(f"{base}/{NAME}", Path(directory)), indent=1, default=str))
        finally:
            server.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.gameday.settings"
    main()
