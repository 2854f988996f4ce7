"""Who holds a key at this moment: the session that has its record or its claim locked. Only PostgreSQL tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_idempotency.maintenance.records import TABLE
from django_idempotency.models import LIVE
from django_idempotency.policy import Mode
from django_idempotency.stats.formatting import age
from django_idempotency.stats.queries import ask_postgresql
from django_idempotency.stores.claim_function import LOCK_HOLDERS
from django_idempotency.values.keys import id_range, record_id
from django_idempotency.values.printable import printable


@dataclass(frozen=True, slots=True)
class Owner:
    """A session of the database, as far as this role may see it: ``pg_stat_activity`` hides the rest as ``None``.

    ``pid``: of its server process; ``None`` for a prepared transaction. ``address``: of the client, or of a pooler in
    between; empty for a socket on the same host. ``transaction``, ``in_state``: seconds since its transaction began,
    and since it entered its ``state``. ``waits_for``: for example ``Lock: transactionid``; empty if it waits for
    nothing.
    """

    pid: int | None
    user: str | None
    application: str | None
    address: str | None
    state: str | None
    transaction: float | None
    in_state: float | None
    waits_for: str | None

    def __str__(self) -> str:
        if self.pid is None:
            return _(
                "a prepared transaction, which belongs to no session: COMMIT PREPARED or ROLLBACK PREPARED ends it"
            )
        named = _("PID %(pid)s of the database (user %(user)s, %(application)s)") % {
            "pid": self.pid,
            "user": printable(self.user or "?"),
            "application": printable(self.application or "") or _("without a name"),
        }
        if self.state is None:
            hidden = _("the rest is hidden from this role, which is not a member of pg_read_all_stats")
            return f"{named}; {hidden}"
        parts = [
            named,
            _("from %(address)s") % {"address": self.address} if self.address else _("from the database's own host"),
            _("%(state)s for %(age)s") % {"state": self.state, "age": age(self.in_state or 0)},
            _("its transaction began %(age)s ago") % {"age": age(self.transaction or 0)},
        ]
        if self.waits_for:
            parts.append(_("it waits for %(what)s") % {"what": self.waits_for})
        return ", ".join(parts)


# A locked row has its transaction's number in xmax, and a running transaction holds a lock on its own number.
SESSION = """
    held.pid, usename, application_name, CASE WHEN state IS NOT NULL THEN coalesce(host(client_addr), '') END, state,
    extract(epoch FROM clock_timestamp() - xact_start)::float8,
    extract(epoch FROM clock_timestamp() - state_change)::float8,
    CASE WHEN state = 'active' AND wait_event_type <> 'Client' THEN wait_event_type || ': ' || wait_event END
"""
OWNER = f"""
    SELECT {SESSION}
    FROM {TABLE} record
    JOIN pg_locks held ON held.locktype = 'transactionid' AND held.granted AND held.transactionid = record.xmax
    LEFT JOIN pg_stat_activity session ON session.pid = held.pid
    WHERE record.id = %s
"""


def owner_of(record: Any) -> Owner | None:
    """Return the session that has the row of ``record`` locked; ``None`` if none has, or the database can't tell."""
    found = ask_postgresql(OWNER, [record.pk], using=record._state.db)
    return Owner(*found[0]) if found else None


def shown_owner(record: Any) -> str:
    """Return in words who holds a record that was read with ``locked``, or why that is not known; empty if it ended."""
    if record.status not in LIVE:
        return ""
    if connections[record._state.db].vendor != "postgresql":
        return _("This database does not show it.")
    if found := owner_of(record):
        return str(found)
    if record.locked:
        return _("A transaction has its row locked; the database does not show whose it is.")
    if record.mode == Mode.LEASE:
        return _("Not kept in lease mode: look for the record's id in the logs and traces.")
    return _("Nobody: no transaction has its row locked.")


# --- Claims by lock, which have no record yet ------------------------------------------------------------------------

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
    return [Owner(*row) for row in found]


def shown_lock_owners(owners: list[Owner], key: str | None = None, *, most: int = 10) -> list[str]:
    """Return a title and a line for each of the first ``most`` owners; nothing if there are none.

    ``key``: set if all of them are owners of this key.
    """
    if not owners:
        return []
    several = ngettext(
        "%(count)d run is in flight without a record: its claim is a lock.",
        "%(count)d runs are in flight without a record: their claims are locks.",
        len(owners),
    )
    title = (
        _("The key is in flight without a record: its claim is a lock.") if key else several % {"count": len(owners)}
    )
    rest = [_("and %(count)d more") % {"count": len(owners) - most}] if len(owners) > most else []
    return [title, *map(str, owners[:most]), *rest]
