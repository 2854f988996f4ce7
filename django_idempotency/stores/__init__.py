"""Where records are kept. The engine is the only caller."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from django import db
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_idempotency.conf import conf
from django_idempotency.stores.base import Store
from django_idempotency.stores.codec import stored_response
from django_idempotency.stores.connections import alias as database_of
from django_idempotency.stores.connections import aliases
from django_idempotency.stores.database import DEFAULTS, DatabaseOptions, DatabaseStore
from django_idempotency.stores.lock_claims import LockClaimStore
from django_idempotency.stores.postgresql import PostgreSQLStore
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Policy
from django_idempotency.values.rules import nearest

__all__ = [
    "DatabaseStore",
    "LockClaimStore",
    "PostgreSQLStore",
    "Store",
    "configured",
    "database_store",
    "store_for",
    "stored_response",
    "stores_of",
]

DEFAULT = "default"


def store_for(policy: Policy, operation: Operation | None = None) -> Store:
    """Return the store that keeps the record of ``operation`` under ``policy``.

    Raises ``ImproperlyConfigured`` for a store that is not in ``STORES`` or can't be
    made, and for one that can't keep what the policy promises, such as atomic mode
    without transactions.
    """
    alias = policy.store
    backend, options = configured(alias)
    if backend is DatabaseStore:
        return database_store(policy, operation, options)
    if why := backend.unfit_for(policy, alias):
        raise ImproperlyConfigured(why)
    return backend.bind(policy, operation, alias, options)


def stores_of(policy: Policy) -> Iterator[Store]:
    """Yield every store that may keep a record under ``policy``: with a callable
    ``using``, one for each shard.

    A store outside the database is yielded once, whatever ``using`` says. Raises what
    ``store_for`` raises.
    """
    if not callable(policy.using):
        yield store_for(policy)
        return
    stores = (store_for(policy.derive(using=using)) for using in aliases(policy))
    yield from {store.name: store for store in stores}.values()


def database_store(
    policy: Policy,
    operation: Operation | None = None,
    options: DatabaseOptions = DEFAULTS,
) -> DatabaseStore:
    """Return the store for the database of the record of ``operation``, chosen by the
    database's vendor.
    """
    using = database_of(policy, operation)
    known: DatabaseStore | None = policy.derived.get(using)
    if known is None or known.options is not options:
        known = policy.derived[using] = _of_vendor(using, policy)(
            policy, using, options
        )
    return known


def _of_vendor(using: str, policy: Policy) -> type[DatabaseStore]:
    # the name alone is a module of this package
    if db.connections[using].vendor != "postgresql":
        return DatabaseStore
    return LockClaimStore if policy.claims_by_lock else PostgreSQLStore


# --- The stores that the setting names ------------------------------------------------


class Configured(NamedTuple):
    """One entry of ``STORES``: the class of the store, and what it returned for its
    ``OPTIONS``.
    """

    backend: type[Store]
    options: Any


@lru_cache(maxsize=64)
def configured(alias: str) -> Configured:
    """Return the entry ``alias``. Raises ``ImproperlyConfigured`` if there is none or
    it can't be used.
    """
    stated = conf().stores.get(alias)
    if stated is not None:
        return _made(alias, stated["BACKEND"], stated.get("OPTIONS", {}))
    if alias == DEFAULT:
        return Configured(DatabaseStore, DEFAULTS)
    raise ImproperlyConfigured(
        f"STORES has no {alias!r}: {nearest(alias, {DEFAULT, *conf().stores})}"
    )


def _made(alias: str, path: str, options: Any) -> Configured:
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"STORES: the store {alias!r} can't be imported: {error}"
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, Store)):
        raise ImproperlyConfigured(
            f"STORES: {path} of {alias!r} is not a"
            f" {Store.__module__}.{Store.__qualname__}."
        )
    try:
        return Configured(backend, backend.configure(**options))
    except (ImproperlyConfigured, TypeError) as error:
        raise ImproperlyConfigured(
            f"STORES: the OPTIONS of {alias!r} can't be used: {error}"
        ) from error


def forget(ids: Collection[UUID], using: str) -> float:
    """Stop the stores from replaying these records of the database ``using``. Call it
    once they are changed.

    Return for how many seconds one of them may replay the records all the same.
    """
    found = (configured(alias) for alias in conf().stores)
    return max(
        (each.backend.forget(ids, using, each.options) for each in found), default=0.0
    )


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        configured.cache_clear()


setting_changed.connect(_forget)
