from __future__ import annotations

from tests.compatibility.settings import *

INSTALLED_APPS += [
    "rest_framework",
    "rest_framework_simplejwt",
    "rest_framework_simplejwt.token_blacklist",
]
IDEMPOTENCY = {}
