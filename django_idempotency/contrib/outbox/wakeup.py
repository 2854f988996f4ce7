"""Wait for events, until a commit tells of one if the database can, and never longer than a poll."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, connections

from django_idempotency.contrib.outbox.publishing import CHANNEL
from django_idempotency.stores.connections import has_psycopg3


class Wakeup:
    """Waits with LISTEN on PostgreSQL, on a connection of its own. Elsewhere and behind a pooler, waits by the clock.

    A pooler in transaction mode would deliver the notifications to another client. It is detected by the process id:
    the process that answers is not the one that the connection was opened to.
    """

    def __init__(self, publisher: str, using: str, *, listen: bool) -> None:
        self.publisher = publisher
        self.using = using
        self.connection: Any = None
        self._listens = listen and has_psycopg3(connections[using])

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Return when an event of the publisher may have been committed, at the latest after ``seconds``.

        Return at once if listening has only begun or was cut off, because events may have been committed unnoticed.
        """
        if self.connection is None:
            if self._listens:
                with suppress(DatabaseError), connections[self.using].wrap_database_errors:
                    self._listen()
            if self.connection is None:
                stop.wait(seconds)
            return
        import psycopg

        try:
            for notice in self.connection.notifies(timeout=seconds):
                if notice.payload == self.publisher:
                    return
        except psycopg.Error:
            self.close()

    def _listen(self) -> None:
        wrapper = connections[self.using].copy()
        options = {name: value for name, value in wrapper.settings_dict["OPTIONS"].items() if name != "pool"}
        wrapper.settings_dict = {**wrapper.settings_dict, "OPTIONS": options}
        connection: Any = wrapper.get_new_connection(wrapper.get_connection_params())
        connection.autocommit = True
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone()
        if pid != connection.pgconn.backend_pid:
            self._listens = False
            connection.close()
            return
        connection.execute(f"LISTEN {CHANNEL}")
        self.connection = connection

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
