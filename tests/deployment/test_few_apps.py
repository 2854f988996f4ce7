"""Projects with few apps: what the core and the dashboard need of Django."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import django
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3"}},
    INSTALLED_APPS=sys.argv[2:], SECRET_KEY="-", ROOT_URLCONF=(),
    USE_TZ=True, DEBUG=True,
    MIDDLEWARE=["django_idempotency.middleware.IdempotencyMiddleware"],
    IDEMPOTENCY=eval(sys.argv[1]),
)
django.setup()
call_command("check")
WSGIHandler()
"""
CORE, DASHBOARD = "django_idempotency", "django_idempotency.contrib.dashboard"
OBSERVING = {"DASHBOARD": {"OBSERVE": 600}}


def start(options, *apps):
    command = [sys.executable, "-c", SCRIPT, repr(options), *apps]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_core_starts_without_any_app_of_django():
    started = start({"SCOPE": "public"}, CORE)
    assert started.returncode == 0, started.stderr


def test_observing_starts_without_the_admin():
    started = start(OBSERVING, CORE, DASHBOARD)
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize(
    "app", ["audit", "operations", "outbox", "partitions", "steps"]
)
def test_other_apps_start_without_the_admin(app):
    started = start({}, CORE, f"django_idempotency.contrib.{app}")
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize("apps", [(), ("django.contrib.contenttypes",)])
def test_the_middleware_without_the_app_says_what_to_add(apps):
    started = start({}, *apps)
    assert started.returncode != 0
    assert "Add 'django_idempotency' to INSTALLED_APPS" in started.stderr
    assert "app_label" not in started.stderr
