"""django-ox, which keeps Django's tasks in the database, at least once: with a key,
their effects happen exactly once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from django.db import connection

from tests.messages.conftest import ROOT
from tests.support.databases import create_database, drop_database, environment
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.django_ox,
    pytest.mark.row_locks,
    pytest.mark.slow,
    pytest.mark.usefixtures("django_db_setup"),
]


@pytest.fixture
def python(django_db_blocker, tmp_path):
    """Start Python with arguments, on a database of its own."""
    name = f"{Path(str(connection.settings_dict['NAME'])).stem}_ox"
    with django_db_blocker.unblock(), ExitStack() as stack:
        variables = environment() | {
            "DATABASE_URL": create_database(name, tmp_path),
            "DJANGO_SETTINGS_MODULE": "tests.messages.ox_settings",
        }
        stack.callback(drop_database, name)

        def start(*arguments):
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def test_tasks_whose_worker_is_killed_have_one_effect(python, tmp_path):
    def outcome():
        return json.loads(python("tests.messages.ox_tasks", "report").communicate()[0])

    worker = ("django", "ox_worker", "--interval=0.1", "--lock-timeout=2")
    assert python("django", "migrate", "-v0").wait(300) == 0
    assert python("tests.messages.ox_tasks", "enqueue", str(tmp_path)).wait(180) == 0
    first = python(*worker)
    eventually(Path(tmp_path / "entered").exists)
    first.kill()
    first.wait()
    (tmp_path / "open").touch()
    python(*worker)

    def all_done():
        found = outcome()
        return found if all(value for _status, value in found[1]) else None

    effects, tasks = eventually(all_done, every=1, within=120)
    assert effects == 1
    assert [status for status, _value in tasks] == ["SUCCESSFUL"] * 3
    assert len({value for _status, value in tasks}) == 1
