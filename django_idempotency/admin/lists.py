"""The lists of records that an index serves: in flight, stuck, on hold, free to retry, ended.

A list follows its index and ends after ``MOST`` records. Filtering, sorting and counting it, or anything else that is
done with it, look at no more than those. Records beyond them are found by time or by key.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from django.db.models import Max, Min, Q, QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.models import LIVE, TERMINAL, DatabaseNow, IdempotencyRecord, RowLocked, Status

Records = QuerySet[IdempotencyRecord]

MOST = 10_000
COUNTED = 1000
OFTEN = 3


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``column`` is the one that its index is ordered by; ``time`` is what that column means to an operator.

    ``columns`` are those that the list shows between a record's key and its request.
    """

    title: str | Promise
    help: str | Promise
    condition: Q
    column: str
    time: str | Promise
    columns: tuple[str, ...] = ()
    newest_first: bool = False
    within: Q = field(default_factory=Q)  # a condition on the first ``MOST`` only
    order: tuple[str, ...] = ()

    @property
    def by_index(self) -> str:
        return f"-{self.column}" if self.newest_first else self.column

    @property
    def ordering(self) -> tuple[str, ...]:
        return self.order or (self.by_index,)

    def first(self, rows: Records, since: datetime | None = None, until: datetime | None = None) -> Records:
        """Return the first ``MOST`` of ``rows`` in this situation, with a time from ``since`` to before ``until``."""
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
        """Return how many of ``rows`` are in it, up to ``COUNTED``; ``None`` if only a look at each could tell."""
        # Without the order, PostgreSQL would begin to read the table.
        return None if self.within else rows.filter(self.condition).order_by(self.column)[:COUNTED].count()

    def span(self, rows: Records) -> tuple[datetime, datetime] | None:
        """Return its first and its last time among ``rows``; ``None`` if there are none."""
        ends = rows.filter(self.condition).aggregate(first=Min(self.column), last=Max(self.column))
        return None if ends["first"] is None else (ends["first"], ends["last"])


_UNDECIDED = Q(status=Status.FAILED, response_status__isnull=True)
_DONE = Situation(
    title=_("Ended"),
    help=_("Completed or failed; those that are kept longest come first."),
    condition=Q(status__in=TERMINAL),
    column="purge_at",
    time=_("kept until"),
    columns=("badge", "replays", "shown_created_at"),
    newest_first=True,
)

SITUATIONS = {
    "live": Situation(
        title=_("In flight"),
        help=_("Claimed, but without a response yet; those whose lease ran out first come first."),
        condition=Q(status__in=LIVE),
        column="locked_until",
        time=_("lease until"),
        columns=("badge", "claim"),
    ),
    "stuck": Situation(
        title=_("Lease ran out"),
        help=_("In flight, past its lease, and no transaction has its row locked: its owner is gone."),
        condition=Q(status__in=LIVE, locked_until__lt=DatabaseNow()) & ~Q(RowLocked()),
        column="locked_until",
        time=_("lease until"),
        columns=("badge", "claim"),
    ),
    "on_hold": Situation(
        title=_("On hold"),
        help=_("It is not known whether these took place. Find out, then allow a retry or resolve them."),
        condition=_UNDECIDED & Q(on_hold=True),
        column="updated_at",
        time=_("on hold since"),
        columns=("since", "shown_reason", "shown_attempts"),
    ),
    "retryable": Situation(
        title=_("Failed, free to retry"),
        help=_("The last run failed, and the next request with the key runs again."),
        condition=_UNDECIDED & Q(on_hold=False),
        column="updated_at",
        time=_("failed at"),
        columns=("since", "shown_reason", "shown_attempts"),
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
