"""A full disk: which alerts fire, what operators and clients see, and whether all goes on once there is room."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults.cluster import Cluster, running_cluster, small_disk
from tests.gameday.ground import Page, ground
from tests.support.servers import prepare_database

MEGABYTES = 150
FULL = 60  # seconds


@contextmanager
def supervised(cluster: Cluster) -> Iterator[Counter[str]]:
    """As a service manager does: start the server again, each second, if it has ended."""
    ends, counts = threading.Event(), Counter[str]()

    def supervise() -> None:
        while not ends.wait(1):
            if not cluster.runs:
                counts["started again"] += 1
                with suppress(RuntimeError, TimeoutError):
                    cluster.start()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        yield counts
    finally:
        ends.set()
        supervisor.join()


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Nothing is left of the disk."""
    ballast = disk / "ballast"
    ends = threading.Event()

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file:
            while not ends.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:
                    ends.wait(0.01)  # what the server frees is gone at once

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        ends.set()
        filler.join()
        ballast.unlink()


def day() -> list[dict[str, Any]]:
    with (
        small_disk(MEGABYTES) as disk,
        running_cluster(disk, fsync="on") as cluster,
        tempfile.TemporaryDirectory() as directory,
    ):
        prepare_database(cluster.url())
        with (
            supervised(cluster) as counts,
            ground(cluster.url(), Path(directory), lambda server: Page(server).strip, tries=120) as there,
        ):
            notes = there.notes
            time.sleep(30)
            notes.event("The disk is full: tables, WAL and all")
            with filled(disk):
                time.sleep(FULL / 2)
                print(f"    the page: {notes.strip()}; signing in: {Page(there.server).signed_in}", flush=True)
                time.sleep(FULL / 2)
                print(f"    the page: {notes.strip()}", flush=True)
            notes.event("There is room again")
            time.sleep(75)
            print(f"    the page: {notes.strip()}", flush=True)
            there.clients.stopped.set()
            time.sleep(5)
            notes.stopped.set()
            notes.events.append(_checked(cluster, there.clients.served, there.server.log()) | counts)
            return notes.events


def _checked(cluster: Cluster, served: set[str], log: str) -> dict[str, Any]:
    """What there is to show that nothing was run twice, and that each refusal has a cause in the log."""
    ledger = "SELECT array_agg(reference), count(DISTINCT reference) FROM testproject_ledgerentry"
    references, keys = cluster.execute(ledger)
    return {
        "effects": len(references),
        "keys with an effect": keys,
        "keys that were served": len(served),
        "served without an effect": len(served - set(references)),
        "log of the service": _counted(log, r"The store failed.*", "Service Unavailable", "Internal Server Error"),
        "tracebacks end with": _counted(log, r"^psycopg\.errors\.\w+: \D+"),
        "log of the database": _counted(cluster.log.read_text(), "No space left", "PANIC", "ready to accept"),
    }


def _counted(log: str, *patterns: str) -> Counter[str]:
    return Counter(found for pattern in patterns for found in re.findall(pattern, log, re.MULTILINE))
