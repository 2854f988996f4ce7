"""Who holds a record at this moment: the database session that has its row locked. Only PostgreSQL tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.utils.translation import gettext as _

from django_idempotency.maintenance.records import TABLE
from django_idempotency.models import LIVE
from django_idempotency.policy import Mode
from django_idempotency.printable import printable
from django_idempotency.stats.formatting import age
from django_idempotency.stats.sessions import ask_postgresql


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @classmethod
    def of(cls, row: Sequence[Any]) -> Owner:
        """Return the owner described by a row with the columns of ``SESSION``."""
        pid, user, application, address, state, transaction, in_state, waits_for = row
        return cls(
            pid=pid,
            user=user,
            application=application,
            address=None if state is None else address,
            state=state,
            transaction=None if transaction is None else float(transaction),
            in_state=None if in_state is None else float(in_state),
            waits_for=waits_for,
        )

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
    held.pid, usename, application_name, coalesce(host(client_addr), ''), state,
    extract(epoch FROM clock_timestamp() - xact_start), extract(epoch FROM clock_timestamp() - state_change),
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
    return Owner.of(found[0]) if found else None


def told_owner(record: Any) -> str:
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
