"""What the suites of ``test_plugin`` run with."""

from __future__ import annotations

from tests.support.settings.bare import *  # noqa: F403

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]
ROOT_URLCONF = "tests.contrib.testing.shop"
