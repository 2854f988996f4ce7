from __future__ import annotations

from environ import Env

SECRET_KEY = "not a secret: tests"
USE_TZ = True
_database = Env().db("DATABASE_URL")
DATABASES = {"default": _database, "ledger": {**_database, "NAME": f"{_database['NAME']}_ledger"}}
DATABASE_ROUTERS = ["tests.deployment.customers.models.LedgerRouter"]
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_idempotency",
    "tests.deployment.customers",
]
MIDDLEWARE: list[str] = []
AUTH_USER_MODEL = "customers.Customer"
ROOT_URLCONF = "tests.deployment.customers.suite"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
