"""Where records are kept. The engine is the only caller."""

from __future__ import annotations

from django.db import connections

from django_idempotency.policy import Policy
from django_idempotency.stores.base import Store
from django_idempotency.stores.database import DatabaseStore, alias
from django_idempotency.stores.postgresql import PostgreSQLStore

_STORES: dict[str, Store] = {"postgresql": PostgreSQLStore()}
_PORTABLE: Store = DatabaseStore()


def store_for(policy: Policy) -> Store:
    """The store of the database that ``policy`` keeps its records in."""
    return _STORES.get(connections[alias(policy)].vendor, _PORTABLE)
