"""Checks of the ``IDEMPOTENCY`` setting as a whole; ``policies`` checks what a policy combines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import conf
from django_idempotency.checks.policies import policy_messages

Apps = Sequence[AppConfig] | None

OUTBOX = "django_idempotency.outbox"


@register(Tags.compatibility)
def check_settings(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E001: unknown or impossible settings, or no keys from a callable. E069: options of an outbox that is not there.

    And what ``policy_messages`` yields.
    """
    try:
        policy = conf.conf().policy
        _ = conf.conf().digests  # calls whatever provides keys
    except (ImproperlyConfigured, TypeError) as error:
        return [Error(str(error), hint="Correct the IDEMPOTENCY setting.", id="django_idempotency.E001")]
    return [*policy_messages(policy, "The IDEMPOTENCY setting"), *_outbox()]


def _outbox() -> list[CheckMessage]:
    if not conf.conf().outbox or apps.is_installed(OUTBOX):
        return []
    return [
        Error(
            "OUTBOX is set in the IDEMPOTENCY setting, but the outbox is not installed.",
            hint=f"Add {OUTBOX!r} to INSTALLED_APPS and run migrate, or remove OUTBOX.",
            id="django_idempotency.E069",
        )
    ]


def are_usable() -> bool:
    """Return whether the settings can be read; E001 says why not."""
    try:
        _ = conf.conf().digests
    except (ImproperlyConfigured, TypeError):
        return False
    return True
