"""The lists of records that an index answers: what is in flight, stuck, held, free to retry, answered.

A list goes by its index and ends after ``MOST`` records, so whatever is done with it, filtering, sorting and counting
too, looks at no more than that. Records beyond are found by time or by key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from django.db import connections
from django.db.models import Max, Min, Q
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.maintenance import Records, database
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow, Status

MOST = 10_000
COUNTED = 1000
OFTEN = 3


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``column`` is what its index is ordered by; ``time`` is what that means to a person."""

    title: str | Promise
    help: str | Promise
    condition: Q
    column: str
    time: str | Promise
    newest_first: bool = False
    within: Q = field(default_factory=Q)  # looked for among the first ``MOST``
    order: tuple[str, ...] = ()

    @property
    def by_index(self) -> str:
        return f"-{self.column}" if self.newest_first else self.column

    @property
    def ordering(self) -> tuple[str, ...]:
        return self.order or (self.by_index,)

    def first(self, rows: Records, since: datetime | None = None, until: datetime | None = None) -> Records:
        """Of ``rows`` the first ``MOST`` in this situation, from ``since`` to before ``until`` by its time."""
        rows = rows.filter(self.condition)
        if since is not None:
            rows = rows.filter(**{f"{self.column}__gte": since})
        if until is not None:
            rows = rows.filter(**{f"{self.column}__lt": until})
        last = rows.order_by(self.by_index).values_list(self.column, flat=True)[MOST - 1 : MOST].first()
        if last is not None:
            rows = rows.filter(**{f"{self.column}__{'gte' if self.newest_first else 'lte'}": last})
        return rows.filter(self.within)

    def count(self, rows: Records) -> int | None:
        """How many of ``rows`` are in it, up to ``COUNTED``; ``None`` where only a look at each could tell."""
        # In order, or PostgreSQL would begin to read the table.
        return None if self.within else rows.filter(self.condition).order_by(self.column)[:COUNTED].count()

    def span(self, rows: Records) -> tuple[datetime, datetime] | None:
        """Its first and its last time among ``rows``."""
        ends = rows.filter(self.condition).aggregate(first=Min(self.column), last=Max(self.column))
        return None if ends["first"] is None else (ends["first"], ends["last"])


_UNDECIDED = Q(status=Status.FAILED, response_status__isnull=True)
_DONE = Situation(
    title=_("Ended"),
    help=_("Answered, or failed; those that are kept longest come first."),
    condition=Q(status__in=TERMINAL),
    column="purge_at",
    time=_("kept until"),
    newest_first=True,
)

SITUATIONS = {
    "live": Situation(
        title=_("In flight"),
        help=_("Claimed and not answered yet; those whose lease ran out first come first."),
        condition=Q(status__in=LIVE),
        column="locked_until",
        time=_("lease until"),
    ),
    "stuck": Situation(
        title=_("Lease ran out"),
        help=_("In flight, and past its lease: its holder is gone, or in atomic mode merely slow."),
        condition=Q(status__in=LIVE, locked_until__lt=DatabaseNow()),
        column="locked_until",
        time=_("lease until"),
    ),
    "held": Situation(
        title=_("Held for a decision"),
        help=_("Nobody knows whether these took place. Find out, then release or resolve them."),
        condition=_UNDECIDED & Q(held=True),
        column="updated_at",
        time=_("held since"),
    ),
    "retryable": Situation(
        title=_("Failed, free to retry"),
        help=_("The last run failed, and the next request with the key runs again."),
        condition=_UNDECIDED & Q(held=False),
        column="updated_at",
        time=_("failed at"),
        newest_first=True,
    ),
    "done": _DONE,
    "often": replace(
        _DONE,
        title=_("Replayed often"),
        help=_("Among those that are kept longest, the ones replayed three times or more."),
        within=Q(replays__gte=OFTEN),
        order=("-replays", "-purge_at"),
    ),
}
USUAL = "live"

# A row that is locked or being changed has its transaction's number in xmax, and a running transaction has its own
# number locked. So looking takes no lock and gets in nobody's way.
_HELD_ROWS = """
SELECT id FROM django_idempotency_record WHERE id = ANY(%s) AND xmax IN (
    SELECT transactionid FROM pg_locks WHERE locktype = 'transactionid' AND granted
)
"""


def at_work(ids: Iterable[UUID], *, using: str | None = None) -> set[UUID] | None:
    """Which of these rows a running transaction has locked just now; ``None`` where that can't be told cheaply."""
    connection = connections[database(using)]
    if connection.vendor != "postgresql":
        return None
    wanted = list(ids)
    if not wanted:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(_HELD_ROWS, [wanted])
        return {id for (id,) in cursor.fetchall()}
