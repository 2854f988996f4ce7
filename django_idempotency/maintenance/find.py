"""Find records by situation, endpoint, customer and time, by existing indexes.

Each situation has an index. A list follows it and ends after ``MOST`` records. What is
wanted is looked for among these; a record beyond them is found by its key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import Any

from django.db import connections
from django.db.models import Q
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.timezone import get_current_timezone, is_naive

from django_idempotency.models import TERMINAL, RecordQuerySet, Status

MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``of`` finds the records, by an index that has them in this ``ordering``."""

    of: Callable[[Any], Any]
    ordering: str

    def first(self, rows: Any) -> Any:
        """Return the first ``MOST`` of ``rows`` in this situation."""
        rows = self.of(rows)
        column = self.ordering.removeprefix("-")
        last = (
            rows.order_by(self.ordering)
            .values_list(column, flat=True)[MOST - 1 : MOST]
            .first()
        )
        if last is not None:
            rows = rows.filter(
                **{f"{column}__{'lte' if column == self.ordering else 'gte'}": last}
            )
        return rows


SITUATIONS = {
    "live": Situation(of=RecordQuerySet.live, ordering="locked_until"),
    "stuck": Situation(of=RecordQuerySet.abandoned, ordering="locked_until"),
    "on_hold": Situation(of=RecordQuerySet.awaiting_operator, ordering="updated_at"),
    "retryable": Situation(
        of=lambda rows: rows.filter(
            status=Status.FAILED, response_status__isnull=True, on_hold=False
        ),
        ordering="-updated_at",
    ),
    "done": Situation(
        of=lambda rows: rows.filter(status__in=TERMINAL), ordering="-purge_at"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to look for; empty and ``None`` match everything.

    - ``endpoint``: what the path begins with, perhaps after a method: ``POST /pay/``.
    - ``scope``: a whole scope.
    - ``since``, ``until``: when the record was first claimed.
    """

    endpoint: str = ""
    scope: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def among(self, rows: Any) -> Any:
        """Return those of ``rows`` that are wanted."""
        method, _space, path = self.endpoint.strip().rpartition(" ")
        conditions = {
            "method": method.strip().upper(),
            "path__startswith": path,
            "scope": self.scope,
            "created_at__gte": _stored(self.since, rows.db),
            "created_at__lt": _stored(self.until, rows.db),
        }
        return rows.filter(
            Q(**{name: each for name, each in conditions.items() if each})
        )

    def includes(self, record: Any) -> bool:
        """Whether a record of a store, which keeps no request, is wanted."""
        return (
            not self.endpoint
            and self.scope in ("", record.scope)
            and (self.since is None or self.since <= record.created_at)
            and (self.until is None or record.created_at < self.until)
        )


def _stored(when: datetime | None, using: str) -> datetime | None:
    """Return a time as the database compares it: with ``USE_TZ = False``, only
    PostgreSQL has zones, and the others have times in UTC.
    """
    connection = connections[using]
    if when is None or connection.timezone or connection.vendor == "postgresql":
        return when
    return when.astimezone(UTC).replace(tzinfo=None)


def moment(text: str) -> datetime | None:
    """Return a date or a time (ISO 8601), in the time zone in force unless it names
    one; ``None`` for an empty text. Raises ``ValueError``.
    """
    if not text.strip():
        return None
    found = parse_datetime(text.strip())
    if found is None and (day := parse_date(text.strip())):
        found = datetime.combine(day, time())
    if found is None:
        raise ValueError(f"{text} is neither a date nor a time")
    return found.replace(tzinfo=get_current_timezone()) if is_naive(found) else found
