"""Further aliases of databases that exist as long as a test lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from django.core.management import call_command
from django.db import connection, connections

from tests.support.callers import stop_heartbeat
from tests.support.sql import run_sql

if TYPE_CHECKING:
    # needs psycopg and psutil, which are not everywhere
    from tests.faults.cluster import Cluster


@contextmanager
def role(*grants: str) -> Iterator[str]:
    """Yield the name of a role of PostgreSQL's with these ``grants``, such as ``SELECT
    ON …``; its alone.

    Roles belong to the server, which other runs of these tests may use now.
    """
    name = f"clerk_{uuid4().hex}"
    run_sql(f"CREATE ROLE {name}")
    try:
        for grant in ("USAGE ON SCHEMA public", *grants):
            run_sql(f"GRANT {grant} TO {name}")
        yield name
    finally:
        connection.close()  # with whatever role it has by now
        run_sql(f"DROP OWNED BY {name}; DROP ROLE {name}")


@contextmanager
def another_alias(name: str, **changed: Any) -> Iterator[str]:
    """Have the alias ``name``, with the settings of the default database but for
    ``changed``.

    Afterwards no thread of the package has a connection to it: one that is not among
    the settings any more would be closed by nobody.
    """
    connections.settings[name] = {**connection.settings_dict, "TEST": {}, **changed}
    try:
        yield name
    finally:
        stop_heartbeat()
        connections[name].close()
        # Django closes none to SQLite in memory
        if connections[name].connection is not None:
            connections[name].connection.close()
        del connections[name], connections.settings[name]


@contextmanager
def alias_of_cluster(name: str, cluster: Cluster) -> Iterator[str]:
    """Have the alias ``name``, of a database of ``cluster`` with the package's
    tables.
    """
    options = {"sslmode": "disable", "gssencmode": "disable"}
    where = {
        "HOST": "127.0.0.1",
        "PORT": str(cluster.port),
        "USER": "postgres",
        "NAME": "postgres",
    }
    with another_alias(name, **where, PASSWORD="", OPTIONS=options):
        call_command("migrate", "django_idempotency", database=name, verbosity=0)
        yield name
