"""docs/uninstalling.md: its commands leave no table and no function behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing

import pytest
from django.db import connection

from tests.support.databases import create_database, drop_database
from tests.support.pages import ROOT, text

LEFT = """
    SELECT relname FROM pg_class WHERE relname LIKE '%idempotency%'
    UNION SELECT proname FROM pg_proc WHERE proname LIKE '%idempotency%'
"""


@pytest.fixture
def manage(tmp_path, db):
    """Runs a command of the test project on a database of its own, ``manage.name``."""
    name = f"{connection.settings_dict['NAME']}_uninstalled"
    url = create_database(name, tmp_path)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "testproject", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "DATABASE_URL": url,
                "DJANGO_SETTINGS_MODULE": "testproject.settings",
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    run.name = name
    yield run
    drop_database(name)


def left(name):
    with closing(connection.copy()) as other:
        other.settings_dict["NAME"] = name
        with other.cursor() as cursor:
            cursor.execute(LEFT)
            return {found for (found,) in cursor.fetchall()}


@pytest.mark.drf
@pytest.mark.postgresql
@pytest.mark.slow
def test_the_page_leaves_no_table_and_no_function_behind(manage):
    commands = re.findall(
        r"manage\.py (migrate .* zero)$", text("uninstalling.md"), re.M
    )
    assert len(commands) == 6
    manage("migrate", "--skip-checks")
    assert {"django_idempotency_record", "django_idempotency_claim"} <= left(
        manage.name
    )
    for command in commands:
        manage(*command.split())
    assert left(manage.name) == set()
