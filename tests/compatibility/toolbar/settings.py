from __future__ import annotations

from tests.compatibility.settings import *

DEBUG = True
INSTALLED_APPS += ["django.contrib.staticfiles", "debug_toolbar"]
MIDDLEWARE = ["debug_toolbar.middleware.DebugToolbarMiddleware", *MIDDLEWARE]
STATIC_URL = "static/"
DEBUG_TOOLBAR_CONFIG = {
    "SHOW_TOOLBAR_CALLBACK": "tests.compatibility.toolbar.urls.always",
    "RESULTS_CACHE_SIZE": 1000,
}
