"""The least that the package needs: no REST framework, no Celery, no django-environ."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from django_idempotency import Lease

address = urlsplit(
    os.environ.get("DATABASE_URL", "postgres://postgres@127.0.0.1:5432/bare")
)
SECRET_KEY = "not a secret: tests"
ALLOWED_HOSTS = ["*"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": address.hostname or "",
        "PORT": address.port or "",
        "USER": address.username or "",
        "PASSWORD": unquote(address.password or ""),
        "NAME": address.path.removeprefix("/"),
    }
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_idempotency",
    "django_idempotency.contrib.dashboard",
    "django_idempotency.contrib.outbox",
    "testproject",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_idempotency.middleware.IdempotencyMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
# for Django 6.1
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
IDEMPOTENCY = {"LEASE": Lease(seconds=20)}
ROOT_URLCONF = "tests.support.admin_urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
