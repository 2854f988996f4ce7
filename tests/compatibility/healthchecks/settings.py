"""Healthchecks, whose source is in the directory ``HEALTHCHECKS``, with the middleware
after its own.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256

sys.path.insert(0, os.environ["HEALTHCHECKS"])

from hc.settings import *

from tests.compatibility.settings import (  # noqa: F401
    ALLOWED_HOSTS,
    DATABASES,
    ROOT_URLCONF,
)


def owner_of_api_key(request):
    secret = request.headers.get("X-Api-Key")
    return f"api-key:{sha256(secret.encode()).hexdigest()}" if secret else None


SECRET_KEY = "not a secret: tests"
INSTALLED_APPS = (*INSTALLED_APPS, "django_idempotency")
MIDDLEWARE = [*MIDDLEWARE, "django_idempotency.middleware.IdempotencyMiddleware"]
IDEMPOTENCY = {"SCOPE": owner_of_api_key}
