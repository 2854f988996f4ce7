"""The alarms of the stores in ``STORES`` whose records are not in a database."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import takewhile

from django_idempotency.conf import conf
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.stats.queries import Alarms
from django_idempotency.stores import DatabaseStore, Store, stores_of
from django_idempotency.stores.configured import configured
from django_idempotency.values.outcomes import Snapshot


def outside_stores() -> list[str]:
    """Return the aliases of the stores outside a database."""
    found = ((alias, configured(alias).backend) for alias in conf().stores)
    return [alias for alias, backend in found if not issubclass(backend, DatabaseStore)]


def outside_store(alias: str) -> Store:
    """Return a store outside a database, for an operator. Raises ``ImproperlyConfigured`` if it can't be used."""
    return next(stores_of(conf().policy.derive(mode=conf().lease, store=alias)))


def labelled(alias: str) -> str:
    """Return what figures call a store: not its alias alone, which may be that of a database, too."""
    return f"store:{alias}"


def alarms_of_store(alias: str, *, seconds: float) -> Alarms:
    """Return the alarms of a store; ``on_hold_oldest`` counts from the first claim of the record.

    Raises ``StoreUnavailable`` if the store can't be reached, or if its records could not be read in ``seconds``.
    """
    ends = time.monotonic() + seconds
    read = list(takewhile(lambda _record: time.monotonic() < ends, outside_store(alias).unfinished()))
    if time.monotonic() >= ends:
        raise StoreUnavailable(f"The records of the store {alias!r} could not be read in {seconds:g} s.")
    return alarms_of(read)


def alarms_of(unfinished: Iterable[Snapshot]) -> Alarms:
    """Return the alarms of these records. Pure."""
    on_hold, stuck = [], []
    for record in unfinished:
        if record.on_hold:
            on_hold.append((record.now - record.created_at).total_seconds())
        elif record.locked_until is not None and record.locked_until < record.now:
            stuck.append((record.now - record.locked_until).total_seconds())
    return Alarms(
        stuck=len(stuck),
        stuck_oldest=max(stuck, default=0.0),
        on_hold=len(on_hold),
        on_hold_oldest=max(on_hold, default=0.0),
    )
