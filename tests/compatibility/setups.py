"""The packages and applications that the scenario runs with, each in a virtual
environment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """``settings``: in this directory. The newest version of the first requirement is
    stated.

    ``checkout``: the environment variable that names the directory of an application's
    source.
    """

    settings: str
    requires: tuple[str, ...]
    checkout: str | None = None


SETUPS = {
    "installed": Setup(
        "installed.settings",
        (
            "django-otp",
            "django-axes",
            "django-ninja",
            "drf-spectacular",
            "django-cors-headers",
            "django-prometheus",
        ),
    ),
    "views": Setup(
        "views.settings", ("graphene-django", "django-reversion", "django-ratelimit")
    ),
    "interfaces": Setup(
        "interfaces.settings",
        (
            "adrf",
            "djangorestframework-camel-case",
            "drf-standardized-errors",
            "django-cachalot",
            "whitenoise",
        ),
    ),
    "companions": Setup(
        "companions.settings",
        (
            "django-simple-history",
            "django-auditlog",
            "django-easy-audit",
            "django-pghistory",
            "django-guardian",
            "django-structlog",
            "django-waffle",
            "django-csp",
            "django-import-export",
            "django-rest-knox",
            "django-oauth-toolkit",
            "djangorestframework-api-key",
        ),
    ),
    "allauth": Setup("allauths.settings", ("django-allauth",)),
    "strawberry": Setup("strawberrys.settings", ("strawberry-graphql",)),
    "simplejwt": Setup("simplejwt.settings", ("djangorestframework-simplejwt",)),
    "oscarapi": Setup("oscarapi.settings", ("django-oscar-api", "django-oscar")),
    "tenants": Setup("tenants.settings", ("django-tenants",)),
    "tenants-apart": Setup("tenants.settings_apart", ("django-tenants",)),
    "toolbar": Setup("toolbar.settings", ("django-debug-toolbar",)),
    "silk": Setup("silk.settings", ("django-silk",)),
    "sentry": Setup("sentry.settings", ("sentry-sdk",)),
    "healthchecks": Setup("healthchecks.settings", (), checkout="HEALTHCHECKS"),
}
