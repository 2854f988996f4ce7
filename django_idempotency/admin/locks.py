"""What a list of records can't show: keys in flight that are claimed by lock, and have no record yet."""

from __future__ import annotations

from django.http import HttpRequest

from django_idempotency.admin.filters import situation_of, term_of
from django_idempotency.admin.limits import panel
from django_idempotency.admin.lists import SITUATIONS
from django_idempotency.admin.shards import database_of
from django_idempotency.maintenance.lock_owners import lock_owners, told_lock_owners


def in_flight_by_lock(request: HttpRequest) -> list[str]:
    """Return who holds the lock of the key searched for or, beside the list of what is in flight, of any key."""
    term = term_of(request.GET.get("q", "")) or None
    if term is None and situation_of(request) is not SITUATIONS["live"]:
        return []
    owners = panel(lambda ask: ask(lock_owners, key=term), database_of(request))
    return told_lock_owners(owners or [], term)
