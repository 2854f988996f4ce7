"""Where records are kept. The engine is the only caller."""

from __future__ import annotations

from collections.abc import Iterator

from django_idempotency.conf import conf
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Store
from django_idempotency.stores.codec import stored_response
from django_idempotency.stores.configured import DEFAULT, configured
from django_idempotency.stores.connections import aliases
from django_idempotency.stores.database import DatabaseStore, database_store
from django_idempotency.stores.lock_claims import LockClaimStore
from django_idempotency.stores.postgresql import PostgreSQLStore
from django_idempotency.values.outcomes import Operation

__all__ = ["DatabaseStore", "LockClaimStore", "PostgreSQLStore", "Store", "store_for", "stored_response", "stores_of"]


def store_for(policy: Policy, operation: Operation | None = None) -> Store:
    """Return the store that keeps the record of ``operation`` under ``policy``.

    Raises ``ImproperlyConfigured`` for a store that is not in ``STORES`` or can't be made, and for atomic mode on one
    that has no transactions.
    """
    if policy.store == DEFAULT and not conf().stores:
        return database_store(policy, operation)
    return configured(policy.store).store(policy, operation)


def stores_of(policy: Policy) -> Iterator[Store]:
    """Yield every store that may keep a record under ``policy``: with a callable ``using``, one for each shard.

    A store outside the database is yielded once, whatever ``using`` says. Raises what ``store_for`` raises.
    """
    if not callable(policy.using):
        yield store_for(policy)
        return
    stores = (store_for(policy.derive(using=using)) for using in aliases(policy))
    yield from {store.name: store for store in stores}.values()
