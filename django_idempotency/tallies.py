"""How often what happened at which view: counted in memory, added up in the database, five minutes to a row.

It is told by the signals. No request waits for it, none carries a statement of it, and none fails by it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import connections, transaction
from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.heartbeat import heartbeat
from django_idempotency.models import IdempotencyTally
from django_idempotency.outcomes import Operation
from django_idempotency.stores.database import ahead, alias

EVENTS = {name: signal for name, signal in vars(signals).items() if isinstance(signal, Signal)}
FLUSH_EVERY = 10.0
PERIOD = 300
MOST_VIEWS = 200  # that a process tells apart
OTHER_VIEWS = "(others)"
MAINTENANCE = "(maintenance)"
FORGOTTEN_AT_ONCE = 10_000

TABLE = IdempotencyTally._meta.db_table
LONGEST = IdempotencyTally._meta.get_field("view").max_length or 0

# The beginning of the period by the database's clock.
_SINCE = {
    "postgresql": f"date_bin('{PERIOD} s', statement_timestamp(), 'epoch')",
    "mysql": (
        f"timestampadd(SECOND, -mod(timestampdiff(SECOND, '1970-01-01', utc_timestamp()), {PERIOD}), utc_timestamp())"
    ),
    "sqlite": f"datetime(strftime('%%s', 'now') / {PERIOD} * {PERIOD}, 'unixepoch')",
}
_ADD = {
    "postgresql": f"ON CONFLICT (since, view, event) DO UPDATE SET count = {TABLE}.count + EXCLUDED.count",
    "mysql": "ON DUPLICATE KEY UPDATE count = count + VALUES(count)",
    "sqlite": "ON CONFLICT (since, view, event) DO UPDATE SET count = count + EXCLUDED.count",
}


class Tallies:
    """The counts of this process that are not written yet."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._views: set[str] = set()

    def count(self, event: str, view: str) -> None:
        """Count one event; written within ten seconds or so."""
        if conf().tally is None:
            return
        view = view[-LONGEST:] or MAINTENANCE
        with self._lock:
            if view not in self._views:
                if len(self._views) < MOST_VIEWS:
                    self._views.add(view)
                else:
                    view = OTHER_VIEWS
            first = not self._counts
            self._counts[view, event] += 1
        if first:
            heartbeat.later(self.flush, FLUSH_EVERY)

    def flush(self) -> None:
        """Add what was counted to the table, in one statement. After an error it is counted still."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        try:
            _add(counts)
        except BaseException:
            with self._lock:
                self._counts.update(counts)
            raise


def _add(counts: Counter[tuple[str, str]]) -> None:
    if not counts:
        return
    connection = connections[alias(conf().policy)]
    row = f"({_SINCE[connection.vendor]}, %s, %s, %s)"
    # All processes in one order: so they wait for each other, and not in a circle.
    values = [value for (view, event), count in sorted(counts.items()) for value in (view, event, count)]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (since, view, event, count) VALUES {', '.join([row] * len(counts))}"
            f" {_ADD[connection.vendor]}",
            values,
        )


def listen() -> None:
    """Have every signal counted."""
    for event, signal in EVENTS.items():
        signal.connect(_counting(event), weak=False, dispatch_uid=__name__)


def _counting(event: str) -> Callable[..., None]:
    def count(operation: Operation, **_named: Any) -> None:
        tallies.count(event, operation.view)

    return count


def forget(*, using: str | None = None) -> int:
    """Delete the oldest tallies past the setting ``TALLY``, about ``FORGOTTEN_AT_ONCE``; how many that were."""
    using = using or alias(conf().policy)
    past = IdempotencyTally.objects.using(using).filter(since__lt=ahead(-(conf().tally or 0)))
    with transaction.atomic(using=using):
        some = list(past.order_by("since").values_list("since", flat=True)[:FORGOTTEN_AT_ONCE])
        return past.filter(since__lte=some[-1])._raw_delete(using) if some else 0


tallies = Tallies()
os.register_at_fork(after_in_child=tallies._reset)
