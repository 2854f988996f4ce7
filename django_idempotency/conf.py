"""The ``IDEMPOTENCY`` setting, read live. The only module that looks at ``django.conf.settings``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_idempotency import policy
from django_idempotency.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Conf:
    """The settings that no view overrides, and the policy that every view starts from.

    ``header``: the request header that carries the key.
    ``exempt_paths``: regular expressions; the middleware leaves paths that match one alone.
    ``problem_base``: what the ``type`` and ``Link`` of our problem answers start with; the code is appended.
    """

    header: str = "Idempotency-Key"
    exempt_paths: tuple[str, ...] = ()
    problem_base: str = "https://django-idempotency.readthedocs.io/en/stable/errors/#"
    policy: Policy = field(default_factory=Policy)

    @cached_property
    def meta_name(self) -> str:
        return "HTTP_" + self.header.upper().replace("-", "_")

    @cached_property
    def exempt(self) -> re.Pattern[str] | None:
        return re.compile("|".join(f"(?:{path})" for path in self.exempt_paths)) if self.exempt_paths else None


GLOBAL_NAMES = frozenset(field.name for field in fields(Conf)) - {"policy"}
NAMES = frozenset(name.upper() for name in GLOBAL_NAMES | policy.NAMES)


def stated() -> dict[str, Any]:
    """The ``IDEMPOTENCY`` setting as it stands in the project's settings."""
    return getattr(settings, "IDEMPOTENCY", {})


def errors() -> list[str]:
    """A sentence for each name in ``IDEMPOTENCY`` that means nothing."""
    return policy.unknown_names(stated(), NAMES)


@lru_cache(maxsize=1)
def conf() -> Conf:
    """The settings in force.

    Raises ``ImproperlyConfigured`` that names the nearest right name for an unknown one.
    """
    if wrong := errors():
        raise ImproperlyConfigured("IDEMPOTENCY: " + " ".join(wrong))
    options = {name.lower(): value for name, value in stated().items()}
    general = {name: options.pop(name) for name in list(options) if name in GLOBAL_NAMES}
    return Conf(**general, policy=Policy(**options))


@lru_cache(maxsize=1024)
def resolve(policy: Policy) -> Policy:
    """A view's policy over the project's."""
    return policy.over(conf().policy)


def debug() -> bool:
    return bool(settings.DEBUG)


def middleware() -> list[str]:
    return list(settings.MIDDLEWARE)


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        conf.cache_clear()
        resolve.cache_clear()


setting_changed.connect(_forget)
