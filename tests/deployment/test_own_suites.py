"""Projects of their own whose tests are run by Django's test runner."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.databases import create_database, drop_database
from tests.support.requirements import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def passes(db, tmp_path):
    """Run the suite of a project; check that it passes, and how many tests it has."""

    def run(project, tests):
        settings = {"DJANGO_SETTINGS_MODULE": f"tests.deployment.{project}.settings"}
        command = [*(sys.executable, "-m", "django", "test"), f"tests.deployment.{project}.suite", "--noinput"]
        try:
            done = subprocess.run(
                command,
                **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
                env=os.environ | settings | {"DATABASE_URL": create_database(project, tmp_path)},
            )
        finally:
            drop_database(project)
        assert done.returncode == 0, done.stderr
        assert f"Ran {tests} tests" in done.stderr

    return run


@pytest.mark.server  # its settings come from django-environ
def test_a_project_with_own_users_and_two_databases(passes):
    """UUID users, ``TestCase`` and ``TransactionTestCase``, a second alias, its router, and the check of it."""
    passes("customers", 11)


@pytest.mark.watched_logins
def test_l13_failed_logins_count_with_a_key_as_without(passes):
    """By the real django-axes and django-otp, in autocommit and with ``ATOMIC_REQUESTS``."""
    passes("logins", 4)
