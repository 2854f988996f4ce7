"""A database that can't be reached, or refuses, ends a command with one line, and with
JSON where that is asked for.
"""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_idempotency.management.commands import idempotency_consume
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.keys import record_id
from tests.support.aliases import another_alias, role
from tests.support.private_servers import free_port

COMMANDS = {
    "idempotency_keys list": (),
    "idempotency_keys show": ("k",),
    "idempotency_reap": (),
    "idempotency_privacy erase": ("--scope=public",),
    "idempotency_stats": (),
    "idempotency_partitions": ("status",),
    "idempotency_outbox status": (),
}


def told(capsys, name, *arguments):
    """The error that the command ends with, and what it said in JSON."""
    with pytest.raises(CommandError) as ended:
        call_command(*name.split(), *arguments, "--json", *COMMANDS[name])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"error": str(ended.value)}
    return ended.value


@contextmanager
def without_rights():
    with role() as name, connection.cursor() as cursor:
        cursor.execute(f"SET ROLE {name}")
        yield


@pytest.mark.row_locks  # SQLite has neither a server nor rights
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.postgresql if "partitions" in name else ())
        for name in COMMANDS
    ],
)
def test_an_unavailable_database_ends_a_command_with_one_line(
    transactional_db, capsys, name
):
    with another_alias("away", HOST="127.0.0.1", PORT=str(free_port())):
        error = told(capsys, name, "--database=away")
    assert str(error).startswith(
        "The database or store failed, or can't be reached: OperationalError"
    )
    assert (error.returncode, "\n" in str(error)) == (1, False)


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name != "idempotency_partitions"]
)
def test_a_missing_privilege_ends_a_command_with_one_line(
    transactional_db, capsys, name
):
    with without_rights():
        assert (
            str(told(capsys, name))
            == "The database or store failed, or can't be reached: ProgrammingError"
            " 42501"
        )


class Unfit:
    """A runner whose handler's database is away."""

    batch = 1

    def run(self):
        IdempotencyRecord.objects.using("away").exists()

    def stop(self):
        pass


@pytest.mark.row_locks
def test_a_consumer_without_its_database_ends_in_a_line(transactional_db, monkeypatch):
    monkeypatch.setattr(idempotency_consume, "runner_at", lambda _path: Unfit())
    line = (
        r"^The database or store failed, or can't be reached: OperationalError[^\n]*$"
    )
    with (
        another_alias("away", HOST="127.0.0.1", PORT=str(free_port())),
        pytest.raises(CommandError, match=line),
    ):
        call_command("idempotency_consume", "shop.consumers.receipts")


@pytest.mark.row_locks
def test_a_check_of_an_unavailable_database_exits_with_3(transactional_db, capsys):
    with another_alias("away", HOST="127.0.0.1", PORT=str(free_port())):
        assert (
            told(capsys, "idempotency_stats", "--database=away", "--check").returncode
            == 3
        )


def test_an_unknown_id_is_not_an_error_of_the_database(transactional_db, capsys):
    assert not IdempotencyRecord.objects.filter(pk=record_id("public", "k")).exists()
    assert str(told(capsys, "idempotency_keys show")).startswith("Unknown key")
