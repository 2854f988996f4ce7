"""A project that has all the other packages installed; which of them is at work is said
by each request.
"""

from __future__ import annotations

from tests.compatibility.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "drf_idempotency",
    "drf_idempotencykey",
    "rest_framework_idempotency_key",
    "django_idempotency",
]
IDEMPOTENCY_KEY = {"STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage"}}
IDEMPOTENCY_KEY_LOCK_TIMEOUT = 30
MIDDLEWARE = []
ROOT_URLCONF = ()  # each stage has its own
IDEMPOTENCY = {}
