from __future__ import annotations

from tests.compatibility.settings import *

INSTALLED_APPS += ["django.contrib.messages", "silk"]
MIDDLEWARE = ["silk.middleware.SilkyMiddleware", *MIDDLEWARE]
SILKY_MAX_RECORDED_REQUESTS_CHECK_PERCENT = 0
