"""The checks of the dashboard. The page ``docs/observe.md`` has a section for each
id.
"""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_idempotency.contrib.dashboard.conf import observes, options
from django_idempotency.contrib.dashboard.middleware import ObservingMiddleware
from django_idempotency.extending import of_project
from django_idempotency.extending.operators import Check, each
from django_idempotency.extending.requests import tenant_databases

APP = "django_idempotency.contrib.dashboard"


def why_unreadable(_settings: object) -> Exception | None:
    try:
        options()
    except (ImproperlyConfigured, TypeError) as error:
        return error
    return None


def observes_nothing(_settings: object) -> bool:
    installed = map(import_string, of_project("MIDDLEWARE"))
    return observes() and not any(
        isinstance(one, type) and issubclass(one, ObservingMiddleware)
        for one in installed
    )


def counts_nowhere(_settings: object) -> bool:
    """Whether only tenants have the table of the counters, which are written in no
    tenant's schema.
    """
    shared = of_project("SHARED_APPS")
    apart = (
        any(tenant_databases())
        and shared is not None
        and not any(APP in app for app in shared)
    )
    return apart and options().stats_retention is not None


CHECKS = (
    Check(
        "W001",
        each("settings", observes_nothing),
        "OBSERVE is on, but ObservingMiddleware is not installed: nothing is protected,"
        " and nothing is counted.",
        'Add "django_idempotency.contrib.dashboard.middleware.ObservingMiddleware" to'
        " MIDDLEWARE.",
    ),
    Check(
        "E002",
        each("settings", why_unreadable),
        "{found}",
        "Correct DASHBOARD in the IDEMPOTENCY setting.",
    ),
    Check(
        "W002",
        each("settings", counts_nowhere),
        "The counters are written outside the schemas of tenants, but only these have"
        " their table: nothing is counted.",
        f"Add {APP!r} to SHARED_APPS and migrate, or set STATS_RETENTION to None.",
    ),
)
