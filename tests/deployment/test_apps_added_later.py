"""Apps that are added to a project which has records already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.db import connection

from tests.support.databases import create_database, drop_database
from tests.support.pages import ROOT


@pytest.mark.drf
@pytest.mark.usefixtures("db")
def test_migrate_makes_the_tables_of_apps_that_are_added_later(tmp_path):
    """Django's ``migrate`` runs the checks of the database before it begins: none of
    them may refuse what it is about to mend.
    """
    name = f"{connection.settings_dict['NAME']}_later"
    url = create_database(name, tmp_path)
    environment = os.environ | {
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
    }

    def migrate(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "testproject", "migrate", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        migrate("django_idempotency")
        migrated = migrate()
    finally:
        drop_database(name)
    for app in ("steps", "operations", "outbox", "dashboard", "audit"):
        assert f"Applying django_idempotency_{app}.0001" in migrated
