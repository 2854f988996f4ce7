"""A game day: break the service in several ways, and note which alerts a real
Prometheus raises, and when.

``DATABASE_URL=postgres://… python -m tests.gameday``; takes about fifteen minutes, and
needs ``prometheus``. The alert rules are those of the documentation. So that nobody
waits for hours, every duration in them is divided by ``PACE``, as are the intervals of
scrapes and of rules. The database gets a new one beside it, ``gameday``, for as long as
this runs.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from testproject.interrupts import end_on_signals
from tests.gameday.ground import SETTINGS, Clients, ground
from tests.support.servers import prepare_database

NAME = "gameday"


# --- Faults ---------------------------------------------------------------------------


def freeze_one(clients: Clients, seconds: float) -> None:
    """Stop a worker in the middle of runs in lease mode, until their leases have run
    out and retries have run.
    """
    with ThreadPoolExecutor(8) as pool:
        for _order in range(8):
            pool.submit(clients.charge, "/async/orders/", {"delay_ms": 2000}, 20)
        time.sleep(1)
        frozen = clients.server.workers()[0]
        os.kill(frozen, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(frozen, signal.SIGCONT)


@contextmanager
def locked_table(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        connection.execute(
            "LOCK TABLE django_idempotency_record IN ACCESS EXCLUSIVE MODE"
        )
        yield
        connection.rollback()


# --- The day --------------------------------------------------------------------------


def day(url: str, directory: Path) -> list[dict[str, Any]]:
    with ground(url, directory) as there:
        notes, clients, maintenance = there.notes, there.clients, there.maintenance
        time.sleep(75)

        notes.event(
            "A worker is killed every 4 s, in the middle of a charge; clients retry"
        )
        for _kill in range(28):
            threading.Thread(
                target=clients.charge,
                kwargs={"simulate": {"kill": "after"}},
                daemon=True,
            ).start()
            time.sleep(4)
        notes.event("That ends")
        time.sleep(60)

        notes.event("A worker is frozen for 16 s, in the middle of runs in lease mode")
        freeze_one(clients, 16)
        time.sleep(20)

        notes.event(
            "A worker is killed in the middle of a payout with on_crash=hold, and the"
            " client retries"
        )
        clients.charge("/api/payouts/", {"kill": "before"}, tries=10)
        time.sleep(30)

        notes.event(
            "Clean-up and reaper are stopped; three charges are killed, and never"
            " retried"
        )
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
        there.service.close()
        time.sleep(60)
        notes.stopped.set()
        return notes.events


def of_faults() -> list[dict[str, Any]]:
    """The day, on a database of its own beside the one of ``DATABASE_URL``."""
    base = os.environ["DATABASE_URL"].rpartition("/")[0]
    with psycopg.connect(f"{base}/postgres", autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {NAME}")
        server.execute(f"CREATE DATABASE {NAME}")
        try:
            with tempfile.TemporaryDirectory() as directory:
                prepare_database(f"{base}/{NAME}")
                return day(f"{base}/{NAME}", Path(directory))
        finally:
            server.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")


def main() -> None:
    end_on_signals()
    print(json.dumps(of_faults(), indent=1, default=str))


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = SETTINGS
    main()
