"""No driver of PostgreSQL is forced on a project: the package works with psycopg2, and without any elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.databases import create_database, drop_database

pytestmark = [pytest.mark.server, pytest.mark.slow]  # its settings come from django-environ

ROOT = Path(__file__).parents[2]
PROJECT = """
import json, os, sys, threading
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # None: importing it raises ImportError
import django
from django.conf import settings
from environ import Env
from django.http import HttpResponse
from django_idempotency import Atomic

settings.configure(
    DATABASES={"default": Env.db_url_config(sys.argv[2])}, SECRET_KEY="-", ALLOWED_HOSTS=["*"], USE_TZ=True,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_idempotency"],
    IDEMPOTENCY={"SCOPE": "public", "ATOMIC": Atomic(takeover_grace=0)}, ROOT_URLCONF=(), DEBUG=True,
)
django.setup()
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import connection
from django.test import RequestFactory
from django_idempotency.decorators import idempotent
from django_idempotency.engine.background import background
from django_idempotency.maintenance.cleaner import cleanup
from django_idempotency.maintenance.reaper import reap
from django_idempotency.models import IdempotencyRecord

call_command("migrate", verbosity=0)
call_command("check", databases=["default"])
inside, go_on = threading.Event(), threading.Event()

@idempotent
def pay(request):
    Group.objects.create(name=f"{request.body.decode()} {Group.objects.count()}")
    if request.body == b"slow":
        inside.set()
        assert go_on.wait(30)
    if request.body == b"fails":
        raise ValueError
    return HttpResponse(b"paid \\xff", status=201)

def send(body, key):
    answer = pay(RequestFactory().post("/pay/", body, content_type="text/plain", headers={"Idempotency-Key": key}))
    return answer.status_code, answer.content[:4] == b"paid", answer.headers.get("Idempotent-Replayed")

def fails():
    try:
        send(b"fails", "b")
    except ValueError:
        return Group.objects.filter(name__startswith="fails").count()

def in_flight():
    thread = threading.Thread(target=lambda: (send(b"slow", "c"), connection.close()))
    thread.start()
    assert inside.wait(30)
    status = send(b"slow", "c")[0]
    go_on.set()
    thread.join()
    return status

found = {
    "driver": connection.Database.__name__,
    "first": send(b"one", "a"),
    "replay": send(b"one", "a"),
    "mismatch": send(b"two", "a")[0],
    "after an error": [fails(), fails()],
    "in flight": None if connection.vendor == "sqlite" else in_flight(),
    "groups": Group.objects.filter(name__startswith="one").count(),
}
background.end()
found["replays"] = IdempotencyRecord.objects.with_key("a").get().replays
IdempotencyRecord.objects.create(
    scope="public", key="d", method="POST", path="/", fingerprint=bytes(32), mode="lease", status="processing",
    token="0" * 32, **dict.fromkeys(["locked_at", "locked_until", "created_at", "updated_at"], "2020-01-01T00:00Z"),
    expires_at="2100-01-01T00:00Z", purge_at="2100-01-01T00:00Z", id="1" * 32,
)
reap()
found["reaped"] = IdempotencyRecord.objects.get(key="d").status
IdempotencyRecord.objects.update(expires_at="2020-01-02T00:00Z", purge_at="2020-01-02T00:00Z")
cleanup()
found["left"] = IdempotencyRecord.objects.count()
print(json.dumps(found))
"""


def in_a_project(url, *missing):
    """What comes of a project on the database at ``url`` where the modules ``missing`` can't be imported."""
    run = [sys.executable, "-c", PROJECT, json.dumps(missing), url]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def database(django_db_setup, django_db_blocker, tmp_path):
    with django_db_blocker.unblock():
        yield create_database("drivers", tmp_path)
        drop_database("drivers")


EXPECTED = {
    "first": [201, True, None],
    "replay": [201, True, "true"],
    "mismatch": 422,
    "after an error": [0, 0],
    "groups": 1,
    "replays": 1,
    "reaped": "failed",
    "left": 0,
}


@pytest.mark.psycopg2
@pytest.mark.postgresql
def test_a_project_on_psycopg2_works_without_psycopg_3(database):
    assert in_a_project(database, "psycopg") == EXPECTED | {"driver": "psycopg2", "in flight": 409}


LAWS = ["tests/laws/test_l03_no_phantom_success.py", "tests/laws/test_l04_no_lost_success.py"]


@pytest.mark.psycopg2
@pytest.mark.postgresql
def test_laws_hold_on_psycopg2(database, tmp_path):
    """In processes that can't import psycopg 3, those that the tests start included."""
    (tmp_path / "sitecustomize.py").write_text('import sys; sys.modules["psycopg"] = None')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not server", *LAWS],
        **{"capture_output": True, "text": True, "cwd": ROOT, "timeout": 300},
        env=os.environ | {"DATABASE_URL": database, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CI": ""},
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10


def test_a_project_on_sqlite_needs_no_driver_of_postgresql(tmp_path):
    url = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    found = in_a_project(url, "psycopg", "psycopg2")
    assert found == EXPECTED | {"driver": found["driver"], "in flight": None}
