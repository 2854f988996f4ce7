"""The records are in each tenant's schema."""

from __future__ import annotations

from tests.compatibility.tenants.settings import *

SHARED_APPS = [app for app in SHARED_APPS if app != "django_idempotency"]
TENANT_APPS = [*TENANT_APPS, "django_idempotency"]
