"""The real django-axes and django-otp in a project of their own, with keys and without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.databases import create_database, drop_database
from tests.support.requirements import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.watched_logins
@pytest.mark.parametrize("atomic_requests", ["0", "1"], ids=["autocommit", "ATOMIC_REQUESTS"])
def test_l13_failed_logins_count_with_a_key_as_without(django_db_setup, django_db_blocker, tmp_path, atomic_requests):
    with django_db_blocker.unblock():
        url = create_database("logins", tmp_path)
        try:
            run = subprocess.run(
                [sys.executable, "-m", "django", "test", "tests.deployment.logins.suite", "--noinput"],
                cwd=ROOT,
                env=os.environ
                | {
                    "DJANGO_SETTINGS_MODULE": "tests.deployment.logins.settings",
                    "DATABASE_URL": url,
                    "ATOMIC_REQUESTS": atomic_requests,
                },
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            drop_database("logins")
    assert run.returncode == 0, run.stderr
    assert "Ran 2 tests" in run.stderr
