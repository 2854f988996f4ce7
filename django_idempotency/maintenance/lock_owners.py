"""The sessions that hold a claim by lock, on PostgreSQL: they run operations that have no record yet."""

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
# A lock has 48 bits of the record's id: first 24 of the key's digest, then 24 of the digest of scope and key.
OF_KEY, OF_SCOPE_AND_KEY = 0xFFFFFF000000, 0xFFFFFFFFFFFF


def lock_owners(using: str, key: str | None = None, scope: str | None = None) -> list[Owner]:
    """Return the sessions that hold a claim by lock, the longest first.

    ``key``: only the owners of this raw key, in ``scope``, or in any scope if that is ``None``.

    Takes no locks. A lock has 24 bits of the key's digest, and 24 of that of scope and key, so another key may be taken
    for this one, once in 16 million. The list is empty on databases other than PostgreSQL, or if the database does not
    tell.
    """
    bits = 0
    if key is not None:
        id = id_range(key)[0] if scope is None else record_id(scope, key)
        bits = id.int >> 104 << 24 | id.int >> 24 & 0xFFFFFF
    of_what = 0 if key is None else OF_KEY if scope is None else OF_SCOPE_AND_KEY
    found = ask_postgresql(OWNERS, [of_what, bits & of_what], using=using) or ()
    return [Owner.of(row) for row in found]


def told_lock_owners(owners: list[Owner], key: str | None = None, *, most: int = 10) -> list[str]:
    """Return a title and a line for each of the first ``most`` owners; nothing if there are none.

    ``key``: set if all of them are owners of this key.
    """
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
