"""Checks of the ``IDEMPOTENCY`` setting as a whole; ``policies`` checks what a policy combines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import conf
from django_idempotency.checks.policies import policy_messages

Apps = Sequence[AppConfig] | None


@register(Tags.compatibility)
def check_settings(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E001: unknown or impossible settings, or no keys from a callable; and what ``policy_messages`` yields."""
    try:
        policy = conf.conf().policy
        _ = conf.conf().digests  # calls whatever provides keys
    except (ImproperlyConfigured, TypeError) as error:
        return [Error(str(error), hint="Correct the IDEMPOTENCY setting.", id="django_idempotency.E001")]
    return list(policy_messages(policy, "The IDEMPOTENCY setting"))


def are_usable() -> bool:
    """Return whether the settings can be read; E001 says why not."""
    try:
        _ = conf.conf().digests
    except (ImproperlyConfigured, TypeError):
        return False
    return True
