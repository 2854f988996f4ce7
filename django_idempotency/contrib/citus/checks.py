"""The system check of distributed records, described in ``docs/scaling.md``."""

from __future__ import annotations

from django_idempotency.contrib.citus.store import CitusStore, is_distributed
from django_idempotency.extending.operators import Check, Database, each
from django_idempotency.extending.stores import configured


def lacks_store(database: Database) -> bool:
    backends = {configured(policy.store).backend for policy in database.policies}
    return not all(
        issubclass(backend, CitusStore) for backend in backends
    ) and is_distributed(database.using)


CHECKS = (
    Check(
        "E001",
        each("migrated", lacks_store),
        "The records in the database {it} are on several servers, but their store is"
        " not CitusStore.",
        "Name django_idempotency.contrib.citus.store.CitusStore in STORES.",
        database=True,
    ),
)
