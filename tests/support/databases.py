"""Databases beside the one that pytest-django makes, for processes that the tests
start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.db import connection

from tests.support import distributed

SCHEMES = {"postgresql": "postgres", "mysql": "mysql"}


def database_url(settings: dict[str, Any], name: str | Path, **replaced: Any) -> str:
    """The ``DATABASE_URL`` of the database ``name`` on the server that ``settings`` (of
    a connection) point to.
    """
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    settings = settings | replaced
    user, password = (quote(settings[part], safe="") for part in ("USER", "PASSWORD"))
    # The directory of a socket starts with a slash; behind the one of the URL it stays
    # the host.
    host = (
        f"/{settings['HOST']}" if settings["HOST"].startswith("/") else settings["HOST"]
    )
    port = f":{settings['PORT']}" if settings["PORT"] else ""
    credentials = f"{user}:{password}" if password else user
    return f"{SCHEMES[connection.vendor]}://{credentials}@{host}{port}/{name}"


def environment() -> dict[str, str]:
    """For a process with this one's settings, on the test database, that describes no
    operations.
    """
    given = {
        "OPENAPI": "0",
        "DATABASE_URL": database_url(
            connection.settings_dict, connection.settings_dict["NAME"]
        ),
        # Overridden settings name no module.
        "DJANGO_SETTINGS_MODULE": (
            settings.SETTINGS_MODULE or os.environ["DJANGO_SETTINGS_MODULE"]
        ),
    }
    return os.environ | given


def create_database(name: str, directory: Path) -> str:
    """The URL of a new, empty database on the server under test; on SQLite, in a file
    in ``directory``.
    """
    if connection.vendor == "sqlite":
        return database_url(connection.settings_dict, directory / f"{name}.sqlite3")
    drop_database(name)
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {connection.ops.quote_name(name)}")
    return database_url(connection.settings_dict, name)


def drop_database(name: str) -> None:
    """Drop it, whoever is connected still."""
    if connection.vendor == "sqlite":
        return
    if distributed.WANTED:
        distributed.drop(name)
        return
    force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""
    with connection._nodb_cursor() as cursor:
        cursor.execute(
            f"DROP DATABASE IF EXISTS {connection.ops.quote_name(name)}{force}"
        )
