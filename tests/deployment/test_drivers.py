"""No driver of PostgreSQL is forced on a project: the package works with psycopg2, and
without any elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.databases import create_database, drop_database

# its settings come from django-environ
pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROJECT = """
import json, sys
# None: importing it raises ImportError
sys.modules.update(dict.fromkeys(["psycopg", "psycopg2"]))
import django
from django.conf import settings
from environ import Env
from django.http import HttpResponse

settings.configure(
    DATABASES={"default": Env.db_url_config(sys.argv[1])},
    SECRET_KEY="-", ALLOWED_HOSTS=["*"], USE_TZ=True,
    INSTALLED_APPS=[
        "django.contrib.auth", "django.contrib.contenttypes", "django_idempotency"
    ],
    IDEMPOTENCY={"SCOPE": "public"}, ROOT_URLCONF=(), DEBUG=True,
)
django.setup()
from django.core.management import call_command
from django.test import RequestFactory
from django_idempotency.http.placement import idempotent

call_command("migrate", verbosity=0)
call_command("check", databases=["default"])

@idempotent
def pay(request):
    return HttpResponse(b"paid \\xff", status=201)

def send(body):
    answer = pay(RequestFactory().post(
        "/pay/", body, content_type="text/plain", headers={"Idempotency-Key": "a"}
    ))
    replayed = answer.headers.get("Idempotent-Replayed")
    return answer.status_code, answer.content[:4] == b"paid", replayed

found = [send(b"one"), send(b"one"), send(b"two")[0]]
call_command("idempotency_reap", verbosity=0)
call_command("idempotency_cleanup", verbosity=0)
print(json.dumps(found))
"""


@pytest.fixture
def database(django_db_setup, django_db_blocker, tmp_path):
    with django_db_blocker.unblock():
        yield create_database("drivers", tmp_path)
        drop_database("drivers")


LAWS = [
    *(
        "tests/laws/test_l01_one_execution.py",
        "tests/laws/test_l03_no_phantom_success.py",
    ),
    *(
        "tests/laws/test_l04_no_lost_success.py",
        "tests/maintenance/test_reaper.py",
        "tests/engine/test_background.py",
    ),
]


@pytest.mark.psycopg2
@pytest.mark.postgresql
def test_laws_hold_on_psycopg2(database, tmp_path):
    """In processes that can't import psycopg 3, those that the tests start included."""
    (tmp_path / "sitecustomize.py").write_text(
        'import sys; sys.modules["psycopg"] = None'
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not server",
            *LAWS,
        ],
        **{"capture_output": True, "text": True, "cwd": ROOT, "timeout": 800},
        env=os.environ
        | {
            "DATABASE_URL": database,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "CI": "",
        },
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


def test_a_project_on_sqlite_runs_without_a_driver_of_postgresql(tmp_path):
    run = [sys.executable, "-c", PROJECT, f"sqlite:///{tmp_path / 'db.sqlite3'}"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=800)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [201, True, None],
        [201, True, "true"],
        422,
    ]
