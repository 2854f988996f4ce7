from __future__ import annotations

import structlog
from structlog.testing import LogCapture

from tests.compatibility.settings import *

LOGGED = LogCapture()
structlog.configure(processors=[structlog.contextvars.merge_contextvars, LOGGED])
INSTALLED_APPS += [
    *(
        "auditlog",
        "easyaudit",
        "guardian",
        "import_export",
        "pghistory",
        "pgtrigger",
        "simple_history",
    ),
    *("django_structlog", "tests.compatibility.companions", "waffle"),
    *("rest_framework", "knox", "oauth2_provider", "rest_framework_api_key"),
]
MIDDLEWARE = [
    "csp.middleware.CSPMiddleware",
    *MIDDLEWARE[:-1],
    "django_structlog.middlewares.RequestMiddleware",
    "simple_history.middleware.HistoryRequestMiddleware",
    "auditlog.middleware.AuditlogMiddleware",
    "easyaudit.middleware.easyaudit.EasyAuditMiddleware",
    "pghistory.middleware.HistoryMiddleware",
    "waffle.middleware.WaffleMiddleware",
    MIDDLEWARE[-1],
]
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "guardian.backends.ObjectPermissionBackend",
]
CONTENT_SECURITY_POLICY = {"DIRECTIVES": {"default-src": ["'self'"]}}
PGTRIGGER_MIGRATIONS = False
PGTRIGGER_INSTALL_ON_MIGRATE = True
