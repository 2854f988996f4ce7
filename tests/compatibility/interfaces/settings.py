from __future__ import annotations

from tests.compatibility.settings import *

INSTALLED_APPS += ["rest_framework", "adrf", "drf_standardized_errors", "cachalot"]
MIDDLEWARE = ["whitenoise.middleware.WhiteNoiseMiddleware", *MIDDLEWARE]
STATIC_URL = "static/"
REST_FRAMEWORK = {"UNAUTHENTICATED_USER": None}
CACHALOT_UNCACHABLE_APPS = ("django_idempotency",)  # as deployment.md says
