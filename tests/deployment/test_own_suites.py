"""A project of its own whose tests are run by Django's test runner."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.databases import create_database, drop_database
from tests.support.requirements import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.watched_logins
def test_l13_failed_logins_count_with_a_key_as_without(db, tmp_path):
    """By the real django-axes and django-otp, in autocommit and with ``ATOMIC_REQUESTS``."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.deployment.logins.settings"}
    try:
        done = subprocess.run(
            [*(sys.executable, "-m", "django", "test"), "tests.deployment.logins.suite", "--noinput"],
            **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
            env=os.environ | settings | {"DATABASE_URL": create_database("logins", tmp_path)},
        )
    finally:
        drop_database("logins")
    assert done.returncode == 0, done.stderr
    assert "Ran 4 tests" in done.stderr
