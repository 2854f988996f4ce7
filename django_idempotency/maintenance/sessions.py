"""Which session of the database runs a key: on PostgreSQL, and in atomic mode, where
its transaction has locked the key's row, or the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.utils.translation import gettext as _

from django_idempotency.maintenance.formatting import age
from django_idempotency.maintenance.records import TABLE, is_sharded
from django_idempotency.stores.claim_function import LOCK_HOLDERS, OWNER_LOCKS
from django_idempotency.values.keys import id_range
from django_idempotency.values.printable import in_zone, printable

_COLUMNS = """
SELECT held.pid, session.usename, session.application_name,
    coalesce(concat_ws(' port ', host(session.client_addr),
        nullif(session.client_port, -1)), ''), session.xact_start,
    extract(epoch FROM statement_timestamp() - session.xact_start)::float8,
    session.state
"""
# A locked row has in xmax the number of the transaction that locked it, or of a part of
# it (a savepoint), and a session has a lock on each number of its transaction.
_OF_ROW = f"""
{_COLUMNS}
FROM {TABLE} AS record
JOIN pg_locks AS held ON held.locktype = 'transactionid' AND held.granted
    AND held.transactionid = record.xmax
LEFT JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE record.id = %s AND held.pid IS NOT NULL
"""
_OF_LOCK = f"{_COLUMNS} {LOCK_HOLDERS} AND owner.lock >> %s = %s"


@dataclass(frozen=True, slots=True)
class Session:
    """A session of PostgreSQL, with what this role may see of it.

    ``client``: its address and port, empty for a local socket. Without the rights of
    ``pg_read_all_stats`` or of the session's role, ``client`` is empty, and ``since``
    (the start of its transaction), ``seconds`` and ``state`` are ``None``.
    """

    process: int
    role: str | None
    application: str | None
    client: str
    since: datetime | None
    seconds: float | None
    state: str | None

    def __str__(self) -> str:
        parts = [
            _("process %(process)s") % {"process": self.process},
            _("role %(role)s") % {"role": self.role},
            _("application %(name)s") % {"name": self.application or "?"},
        ]
        if self.since is None or self.seconds is None:
            seen_by = "pg_read_all_stats"
            parts.append(_("host and start are shown to %(role)s") % {"role": seen_by})
        else:
            begun = {
                "at": in_zone(self.since).isoformat(" ", "seconds"),
                "age": age(self.seconds),
            }
            host = self.client or _("local socket")
            parts += [host, _("began %(at)s, %(age)s ago") % begun, self.state or ""]
        return printable(", ".join(filter(None, parts)))


def session_of(record: Any) -> Session | None:
    """Return the session that has locked the row of a record that was read with
    ``locked`` (``RowLocked``).

    ``None`` if there is none by now, if the database is not PostgreSQL, and where the
    records are on several servers, because the session is on another one.
    """
    using = record._state.db
    if not record.locked or is_sharded(using):
        return None
    return next(iter(_sessions(using, _OF_ROW, (record.pk,))), None)


def sessions_by_lock(
    using: str, *, key: str = "", id: UUID | None = None
) -> list[Session]:
    """Return the sessions whose claims are locks on ``key`` in any scope, or on the
    record ``id``, which is not written yet.

    They are found by 24 bits of the key's digest, or by 48 of the id. Empty on
    databases other than PostgreSQL.
    """
    if connections[using].vendor != "postgresql":
        return []
    bits = ((id or id_range(key)[0]).int >> 104) & 0xFFFFFF
    prefix, shift = OWNER_LOCKS << 24 | bits, 24
    if id is not None:
        prefix, shift = prefix << 24 | id.int >> 24 & 0xFFFFFF, 0
    return _sessions(using, _OF_LOCK, (shift, prefix))


def _sessions(using: str, query: str, parameters: Sequence[Any]) -> list[Session]:
    with connections[using].cursor() as cursor:
        cursor.execute(query, parameters)
        return [Session(*row) for row in cursor.fetchall()]
