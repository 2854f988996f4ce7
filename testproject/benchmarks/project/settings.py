"""A project as ``startproject`` creates it, with what the contender in ``$CONTENDER``
adds.
"""

from __future__ import annotations

import json
import os

from testproject.benchmarks import contenders

contender = contenders.load(os.environ["CONTENDER"])

DEBUG = False
SECRET_KEY = "not-a-secret: this service moves no money"
ALLOWED_HOSTS = ["*"]
DATABASES = {
    "default": {
        **json.loads(os.environ["BENCHMARK_DATABASE"]),
        "ATOMIC_REQUESTS": True,
        "CONN_MAX_AGE": None,
        "OPTIONS": json.loads(os.environ.get("BENCHMARK_DATABASE_OPTIONS", "{}")),
    }
}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "rest_framework",
    "testproject.benchmarks.project",
    *contender.apps,
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    *contender.middleware,
]
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "testproject.benchmarks.project.authentication.TheCaller"
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
}
ROOT_URLCONF = "testproject.benchmarks.project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

globals().update(contender.settings)
