"""The stores that the ``STORES`` entry of the ``IDEMPOTENCY`` setting names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_idempotency.conf import conf
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Store
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.options import nearest
from django_idempotency.values.outcomes import Operation

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Configured:
    """One entry of ``STORES``: the class of the store, and what it returned for its ``OPTIONS``."""

    alias: str
    backend: type[Store]
    options: Any

    def store(self, policy: Policy, operation: Operation | None = None) -> Store:
        """Bind the store. Raises ``ImproperlyConfigured`` if it can't keep what the policy promises."""
        if why := self.objection(policy):
            raise ImproperlyConfigured(why)
        return self.backend.bind(policy, operation, self.alias, self.options)

    def objection(self, policy: Policy) -> str | None:
        """Return why ``policy`` can't use this store; ``None`` if it can."""
        if not policy.is_atomic or self.backend.transactional:
            return None
        return (
            f"The policy is in atomic mode, but the store {self.alias!r} ({self.backend.__name__}) can't commit a "
            'view\'s effects together with the record of its key; set mode="lease", or use a store in the database '
            "of the effects."
        )


@lru_cache(maxsize=64)
def configured(alias: str) -> Configured:
    """Return the entry ``alias``. Raises ``ImproperlyConfigured`` if there is none or it can't be used."""
    stated = conf().stores.get(alias)
    if stated is not None:
        return _made(alias, stated["BACKEND"], stated.get("OPTIONS", {}))
    if alias == DEFAULT:
        return Configured(DEFAULT, DatabaseStore, DatabaseStore.configure())
    raise ImproperlyConfigured(f"STORES has no {alias!r}: {nearest(alias, {DEFAULT, *conf().stores})}")


def _made(alias: str, path: str, options: Any) -> Configured:
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"STORES: the store {alias!r} can't be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Store)):
        raise ImproperlyConfigured(f"STORES: {path} of {alias!r} is not a {Store.__module__}.{Store.__qualname__}.")
    try:
        return Configured(alias, backend, backend.configure(**options))
    except (ImproperlyConfigured, TypeError) as error:
        raise ImproperlyConfigured(f"STORES: the OPTIONS of {alias!r} can't be used: {error}") from error


def forget(ids: Collection[UUID], using: str) -> float:
    """Stop the stores from replaying these records of the database ``using``. Call it once they are changed.

    Return for how many seconds one of them may replay the records all the same.
    """
    found = (configured(alias) for alias in conf().stores)
    return max((each.backend.forget(ids, using, each.options) for each in found), default=0.0)


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        configured.cache_clear()


setting_changed.connect(_forget)
