"""The databases that hold records."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db import router

from django_idempotency.conf import conf
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Policy


def alias(policy: Policy, operation: Operation | None = None) -> str:
    """Return the alias of the database of the record of ``operation``.

    ``operation``: may be left out if the policy keeps all records in one database.
    Raises ``ImproperlyConfigured`` if it is left out but needed, and for a database
    that ``SHARDS`` does not name.
    """
    if operation is not None and operation.database is not None:
        return operation.database
    if not callable(policy.using):
        return policy.using or router.db_for_write(IdempotencyRecord)
    if operation is None:
        raise ImproperlyConfigured(
            "`using` chooses a database for each operation, but there is no operation"
            " here."
        )
    chosen, shards = policy.using(operation), conf().shards
    if chosen not in shards:  # no maintenance would ever look there
        raise ImproperlyConfigured(
            f"`using` chose the database {chosen!r}, which is not in SHARDS"
            f" {list(shards)!r}."
        )
    return chosen


def routed(policy: Policy) -> str | None:
    """Return the database that the routers choose now, for an operation to keep;
    ``None`` if ``policy`` chooses one.
    """
    return router.db_for_write(IdempotencyRecord) if policy.using is None else None


def aliases(policy: Policy) -> tuple[str, ...]:
    """Return the aliases of all databases in which ``policy`` may keep records."""
    return tuple(conf().shards) if callable(policy.using) else (alias(policy),)


def databases() -> tuple[str, ...]:
    """Return the aliases that maintenance works on: those of the project's policy, and
    ``SHARDS``.
    """
    return tuple(dict.fromkeys((*aliases(conf().policy), *conf().shards)))


def record_database(using: str | None = None) -> str:
    """Return the alias ``using``, or that of the one database where the project's
    policy keeps its records.

    Raises ``ImproperlyConfigured`` if there are several.
    """
    if using is not None:
        return using
    found = aliases(conf().policy)
    if len(found) != 1:
        raise ImproperlyConfigured(
            "The records are in several databases: pass using=…, one of"
            f" {list(found)!r}."
        )
    return found[0]
