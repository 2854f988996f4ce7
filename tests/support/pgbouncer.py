"""The real PgBouncer, in front of the PostgreSQL under test."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.private_servers import PrivateServer, free_port

CONFIGURATION = """
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = 10
max_client_conn = 500
"""


def program() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")


def _server(settings: dict[str, Any]) -> str:
    """The server behind the pool as libpq parameters; passwords with quotes in them are
    not for tests.
    """
    parameters = {
        "host": settings["HOST"] or "/var/run/postgresql",
        "port": settings["PORT"] or 5432,
        "user": settings["USER"] or "postgres",
        "password": settings["PASSWORD"],
    }
    return " ".join(f"{name}={value}" for name, value in parameters.items() if value)


def _unprivileged(settings: dict[str, Any]) -> str:
    """Who to be instead of root, as whom it refuses to run: somebody who may open the
    server's socket.
    """
    sockets = (
        list(Path(settings["HOST"]).glob(".s.PGSQL.*"))
        if settings["HOST"].startswith("/")
        else []
    )
    return sockets[0].owner() if sockets else "nobody"


@contextmanager
def running_pgbouncer(
    settings: dict[str, Any], directory: Path, *, pool_mode: str = "transaction"
) -> Iterator[int]:
    """The port of a PgBouncer in front of the server in ``settings`` (of a connection),
    stopped at the end.
    """
    port, configuration = free_port(), directory / "pgbouncer.ini"
    filled = {"server": _server(settings), "port": port, "pool_mode": pool_mode}
    configuration.write_text(CONFIGURATION.format_map(filled))
    user = ["-u", _unprivileged(settings)] if os.geteuid() == 0 else []
    command = [str(program()), *user, str(configuration)]
    with PrivateServer(
        command, port, directory / "pgbouncer.log", ending=signal.SIGKILL
    ).running():
        yield port
