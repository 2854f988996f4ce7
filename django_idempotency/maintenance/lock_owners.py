"""Who runs what has no record yet, because its claim is a lock: the sessions that have such a lock, on PostgreSQL."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_idempotency.keys import id_range, record_id
from django_idempotency.maintenance.owners import SESSION, Owner
from django_idempotency.stats.sessions import ask_postgresql
from django_idempotency.stores.claim_function import LOCK_HOLDERS

OWNERS = f"""
SELECT {SESSION}
{LOCK_HOLDERS} AND owner.lock & %s = %s
ORDER BY session.xact_start, held.pid
"""
# Of a lock's 48 bits of the record's id, the first half is of the key's digest, the second of that of scope and key.
OF_KEY, OF_SCOPE_AND_KEY = 0xFFFFFF000000, 0xFFFFFFFFFFFF


def lock_owners(using: str, key: str | None = None, scope: str | None = None) -> list[Owner]:
    """Return the sessions with a claim by lock: all, or those of a raw ``key``, in ``scope`` or any; the longest first.

    Takes no locks. A lock has 24 bits of the key's digest, and 24 of that of scope and key: another key may be taken
    for it, once in 16 million. None on databases other than PostgreSQL, or where the database does not tell.
    """
    bits = 0
    if key is not None:
        id = id_range(key)[0] if scope is None else record_id(scope, key)
        bits = id.int >> 104 << 24 | id.int >> 24 & 0xFFFFFF
    of_what = 0 if key is None else OF_KEY if scope is None else OF_SCOPE_AND_KEY
    found = ask_postgresql(OWNERS, [of_what, bits & of_what], using=using) or ()
    return [Owner.of(row) for row in found]


def told_lock_owners(owners: list[Owner], key: str | None = None, *, most: int = 10) -> list[str]:
    """Say of the first ``most`` owners who they are, after what they are; nothing of none. ``key``: all are of it."""
    if not owners:
        return []
    told = ngettext(
        "%(count)d run is in flight without a record: its claim is a lock.",
        "%(count)d runs are in flight without a record: their claims are locks.",
        len(owners),
    )
    title = _("The key is in flight without a record: its claim is a lock.") if key else told % {"count": len(owners)}
    rest = [_("and %(count)d more") % {"count": len(owners) - most}] if len(owners) > most else []
    return [title, *map(str, owners[:most]), *rest]
