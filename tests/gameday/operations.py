"""What clients see of each operation of a deployment, on a large table: a table for docs/evidence/operations.md.

``python -m tests.gameday.operations``; takes about a quarter of an hour, and gigabytes of disk while it runs. It has a
PostgreSQL of its own, with fsync on, and runs the test project's real service, whose callers run all the time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psycopg

from testproject.benchmarks.growth import TABLE
from testproject.interrupts import end_on_signals
from tests.faults.cluster import Cluster, room, running_cluster
from tests.gameday.callers import Callers, calling, seen
from tests.gameday.ground import LIST, Page
from tests.gameday.large_table import SCOPE, fill, let_two_days_pass
from tests.support.servers import ROOT, Server, prepare_database, running_server

SETTINGS = "tests.gameday.large_settings"
PARAMETERS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "max_connections": "200"}
MIGRATIONS = ("0001_create_record",)
HEADINGS = ("Operation", "Took", "Clients got", "Longest without a response", "Slowest response")
SLOW = 0.5  # seconds: what takes longer is told of


@dataclass
class Deployment:
    """The service with its callers, and what they saw of each operation."""

    cluster: Cluster
    server: Server
    callers: Callers
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def note(self, title: str, work: Callable[[], object]) -> None:
        begun = time.monotonic()
        work()
        ended = time.monotonic()
        answers = self.callers.since(begun, ended)
        saw = seen(answers, begun)
        got = ", ".join(f"{how} ({many:,})" for how, many in sorted(saw.answers.items())) or "–"
        self.rows.append((title, _told(ended - begun), got, _told(saw.silence), _told(saw.slowest)))
        print(" | ".join(self.rows[-1]), file=sys.stderr, flush=True)
        for sent, answered, how in answers:
            if answered - sent > SLOW or not how.startswith(("201", "replayed")):
                print(f"    {how} after {_told(answered - sent)}, sent at {sent - begun:.1f} s", file=sys.stderr)

    def command(self, *arguments: str, ends: tuple[int, ...] = (0,)) -> None:
        """A management command, whose exit code is one of ``ends``."""
        self.note(f"`{' '.join(arguments)}`", lambda: self.run(*arguments, ends=ends))

    def run(self, *arguments: str, ends: tuple[int, ...] = (0,), **environment: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "testproject", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        print(*(f"    {line[:200]}" for line in done.stdout.splitlines()[-3:]), sep="\n", file=sys.stderr)
        if done.returncode not in ends:
            raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")

    def statement(self, statement: str) -> None:
        def execute() -> None:
            self.cluster.execute(statement)

        self.note(f"`{statement}`", execute)

    def page(self, title: str, path: str) -> None:
        page = Page(self.server, timeout=120)
        self.note(title, lambda: page.http.get(path).raise_for_status())


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"


# --- The operations --------------------------------------------------------------------------------------------------


def migrate(deployment: Deployment) -> None:
    """Back to the first migration, and forward again, each for itself."""

    def to(name: str) -> None:
        deployment.run("migrate", "django_idempotency", name, PGOPTIONS="-c lock_timeout=2s")

    for earlier, name in reversed(list(pairwise(MIGRATIONS))):
        deployment.note(f"`{name}`, reversed", lambda earlier=earlier: to(earlier))
    for name in MIGRATIONS[1:]:
        deployment.note(f"`{name}`", lambda name=name: to(name))


def maintain(deployment: Deployment) -> None:
    for arguments in (
        ("idempotency_stats",),
        ("idempotency_keys", "list"),
        ("idempotency_reap",),
        ("idempotency_privacy", "export", "--scope", SCOPE),
        ("idempotency_privacy", "erase", "--scope", SCOPE),
        ("idempotency_cleanup", "--max-seconds", "20"),
    ):
        deployment.command(*arguments)
    deployment.command("idempotency_stats", "--check", ends=(0, 2))  # the clean-up is behind
    deployment.command("idempotency_privacy", "reencrypt", "--max-seconds", "20", ends=(0, 1))  # some may be left
    deployment.page("the list in the admin", LIST)
    deployment.page("a search in the admin, by the beginning of a key", f"{LIST}?q=a1b2")
    deployment.page("the dashboard, of a week", f"{LIST}dashboard/?range=7d")
    for statement in (
        f"VACUUM {TABLE}",
        f"ANALYZE {TABLE}",
        f"REINDEX INDEX CONCURRENTLY {TABLE}_pkey",
        f"CREATE INDEX CONCURRENTLY of_scopes ON {TABLE} (scope)",
    ):
        deployment.statement(statement)
    deployment.cluster.execute("DROP INDEX CONCURRENTLY of_scopes")


def partition(deployment: Deployment) -> None:
    command = deployment.command
    command("idempotency_partitions", "enable", "--yes")
    command("idempotency_partitions", "ensure", "--ahead", "14")
    command("idempotency_partitions", "status")
    with psycopg.connect(deployment.cluster.url(), autocommit=True) as connection:
        let_two_days_pass(connection)
    deployment.callers.since(now := time.monotonic(), now)  # those who waited for that are served
    command("idempotency_partitions", "drop")


# --- All of them -----------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Deployment], None]] = {
    "migrations": migrate,
    "maintenance": maintain,
    "partitions": partition,
}


def deploy(directory: Path, *, rows: int, callers: int, parts: list[str]) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(directory, **PARAMETERS))
        os.environ |= {"DATABASE_URL": cluster.url(), "DJANGO_SETTINGS_MODULE": SETTINGS}
        prepare_database(cluster.url())
        server = stack.enter_context(running_server(cluster.url(), directory, DJANGO_SETTINGS_MODULE=SETTINGS))
        payload = {"amount": 1, "currency": "EUR", "reference": "first"}
        server.post("/api/charges/", payload, key="first").raise_for_status()
        with psycopg.connect(cluster.url(), autocommit=True) as connection:
            fill(connection, rows)
        print(_size(cluster), file=sys.stderr, flush=True)
        called = stack.enter_context(calling(server.url, callers=callers))
        deployment = Deployment(cluster, server, called)
        try:
            deployment.note("nothing, for 20 s", lambda: time.sleep(20))
            for part in parts:
                PARTS[part](deployment)
        finally:
            _report(deployment)


def _size(cluster: Cluster) -> str:
    rows, size = cluster.execute(f"SELECT count(*), pg_size_pretty(pg_total_relation_size('{TABLE}')) FROM {TABLE}")
    version, fsync = cluster.execute("SELECT current_setting('server_version'), current_setting('fsync')")
    return f"{rows:,} rows, {size} with indexes; PostgreSQL {version}, fsync {fsync}"


def _report(deployment: Deployment) -> None:
    lines = [HEADINGS, ("---", "---:", "---", "---:", "---:"), *deployment.rows]
    print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n", flush=True)
    effects, keys = deployment.cluster.execute(
        "SELECT count(*), count(DISTINCT reference) FROM testproject_ledgerentry"
    )
    log = deployment.server.log()
    causes = Counter(re.findall(r"The store failed.*|^(?:\w+\.)+\w*Error: .*", log, re.MULTILINE))
    print(
        f"{effects:,} effects of {keys:,} keys; {log.count('Traceback')} tracebacks in the service's log",
        file=sys.stderr,
    )
    print(*(f"{many} × {cause}" for cause, many in causes.items()), sep="\n", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000, help="of the table; default: 3,000,000")
    parser.add_argument("--callers", type=int, default=8, help="threads with five requests a second each; default: 8")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts; default: all")
    asked = parser.parse_args()
    end_on_signals()
    with room() as directory:
        deploy(directory, rows=asked.rows, callers=asked.callers, parts=asked.only)


if __name__ == "__main__":
    main()
