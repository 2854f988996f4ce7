from __future__ import annotations

from environ import Env

SECRET_KEY = "not a secret: tests"
USE_TZ = True
DATABASES = {"default": Env().db("DATABASE_URL")}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "rest_framework",
    "axes",
    "django_otp",
    "django_otp.plugins.otp_static",
    "django_idempotency",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "axes.middleware.AxesMiddleware",
    "django_idempotency.middleware.IdempotencyMiddleware",
]
AUTHENTICATION_BACKENDS = ["axes.backends.AxesBackend", "django.contrib.auth.backends.ModelBackend"]
AXES_FAILURE_LIMIT = 3
AXES_VERBOSE = False
IDEMPOTENCY = {"SCOPE": "public"}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast: guesses are many
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
