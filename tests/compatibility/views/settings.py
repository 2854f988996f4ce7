from __future__ import annotations

from tests.compatibility.settings import *

INSTALLED_APPS += ["graphene_django", "reversion"]
MIDDLEWARE = ["django_ratelimit.middleware.RatelimitMiddleware", *MIDDLEWARE]
RATELIMIT_VIEW = "tests.compatibility.views.urls.too_many"
# its cache is this process's
SILENCED_SYSTEM_CHECKS = ["django_ratelimit.E003", "django_ratelimit.W001"]
