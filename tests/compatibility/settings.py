"""What the projects have in common; each adds its package to it, and has its views in
``urls`` beside its settings.
"""

from __future__ import annotations

import os

from environ import Env

SECRET_KEY = "not a secret, and long enough for tokens: tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = f"{os.environ['DJANGO_SETTINGS_MODULE'].rpartition('.')[0]}.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": Env().db("DATABASE_URL")}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django_idempotency",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django_idempotency.middleware.IdempotencyMiddleware",
]
TEMPLATES = [
    {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}
]
IDEMPOTENCY = {"SCOPE": "public"}
