"""Users are the tenants' own; the records are in one table for all of them."""

from __future__ import annotations

from tests.compatibility.settings import *

DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
SHARED_APPS = [
    "django_tenants",
    "tests.compatibility.tenants",
    "django.contrib.contenttypes",
    "django_idempotency",
]
TENANT_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
]
INSTALLED_APPS = list(dict.fromkeys([*SHARED_APPS, *TENANT_APPS]))
TENANT_MODEL = "tenants.Shop"
TENANT_DOMAIN_MODEL = "tenants.Domain"
MIDDLEWARE = [
    "django_tenants.middleware.main.TenantMainMiddleware",
    *MIDDLEWARE[:-1],
    "tests.compatibility.tenants.urls.sign_in",
    MIDDLEWARE[-1],
]
IDEMPOTENCY = {}
