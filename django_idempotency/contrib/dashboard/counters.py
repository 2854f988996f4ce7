"""How often each event happened at each view: counted in memory and added up in the
database, in five-minute rows.

Signals trigger the counting. No request waits for it, executes a statement for it or
fails because of it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import connections

from django_idempotency.contrib.dashboard import models
from django_idempotency.contrib.dashboard.conf import options
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.extending import Event, Family, conf
from django_idempotency.extending.figures import oldest_pending
from django_idempotency.extending.stores import (
    Operation,
    alias,
    background,
    databases,
    store_for,
)

FLUSH_EVERY = 10.0
PERIOD = 300
MOST_VIEWS = 200  # that a process tells apart
OTHER_VIEWS = "(others)"
MAINTENANCE = "(maintenance)"

TABLE = IdempotencyCounter._meta.db_table
LONGEST = IdempotencyCounter._meta.get_field("view").max_length or 0

# The beginning of the current period, by the database's clock.
_SINCE = {
    "postgresql": f"date_bin('{PERIOD} s', statement_timestamp(), 'epoch')",
    "mysql": (
        "timestampadd(SECOND, -mod(timestampdiff(SECOND, '1970-01-01',"
        f" utc_timestamp()), {PERIOD}), utc_timestamp())"
    ),
    "sqlite": f"datetime(strftime('%%s', 'now') / {PERIOD} * {PERIOD}, 'unixepoch')",
}
# Counts are added up. Of the seconds in a row ``OLDEST``, the most are kept. Citus does
# not pass on ``CASE … WHEN 'constant'``.
OLDEST = "pending_oldest"
_ADD = {
    "postgresql": (
        "ON CONFLICT (since, view, event) DO UPDATE SET count = CASE"
        f" WHEN {TABLE}.event = '{OLDEST}'"
        f" THEN greatest({TABLE}.count, EXCLUDED.count)"
        f" ELSE {TABLE}.count + EXCLUDED.count END"
    ),
    "mysql": (
        f"ON DUPLICATE KEY UPDATE count = IF(event = '{OLDEST}',"
        " greatest(count, VALUES(count)), count + VALUES(count))"
    ),
    "sqlite": (
        "ON CONFLICT (since, view, event) DO UPDATE SET count = CASE event"
        f" WHEN '{OLDEST}' THEN max(count, EXCLUDED.count)"
        " ELSE count + EXCLUDED.count END"
    ),
}


class Counters:
    """The counts of this process that are not written yet, by the database to which
    they will be written.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._flushes: dict[str, Callable[[], None]] = {}
        self._views: set[str] = set()

    def count(
        self, event: str, view: str, operation: Operation | None = None, count: int = 1
    ) -> None:
        """Count ``count`` events in the database of the record of ``operation``.
        Written after about ten seconds.
        """
        if options().stats_retention is None:
            return
        using = alias(conf().policy, operation)
        view = view[-LONGEST:] or MAINTENANCE
        with self._lock:
            if view not in self._views:
                if len(self._views) < MOST_VIEWS:
                    self._views.add(view)
                else:
                    view = OTHER_VIEWS
            first = not self._counts[using]
            self._counts[using][view, event] += count
            flush = self._flushes.setdefault(using, partial(self.flush, using))
        if first:
            background.later(flush, FLUSH_EVERY, store_for(conf().policy, operation))

    def flush(self, using: str | None = None) -> None:
        """Add the counts to the tables of all databases, or of one, with one statement
        each, and note how old the oldest pending key is.

        After an error the counts are kept.
        """
        for name in [using] if using else list(self._counts):
            with self._lock:
                counts = self._counts.pop(name, Counter())
            try:
                _add(counts, name)
            except BaseException:  # no count is lost, whatever ends the flush
                with self._lock:
                    self._counts[name].update(counts)
                raise


def _add(counts: Counter[tuple[str, str]], using: str) -> None:
    if not counts:
        return
    if (oldest := round(oldest_pending(using=using))) > 0:
        counts[MAINTENANCE, OLDEST] = oldest
    connection = connections[using]
    row = f"({_SINCE[connection.vendor]}, %s, %s, %s)"
    # All processes use the same order, so they may wait for each other but never
    # deadlock.
    values = [
        value
        for (view, event), count in sorted(counts.items())
        for value in (view, event, count)
    ]
    rows = ", ".join([row] * len(counts))
    statement = (
        f"INSERT INTO {TABLE} (since, view, event, count) VALUES {rows}"
        f" {_ADD[connection.vendor]}"
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def count_event(
    event: Event, family: Family | None, *, sender: object, **named: Any
) -> None:
    if family is None:
        counters.count(event.counted_as, named["operation"].view, named["operation"])
        return
    # Under a view such as ``(outbox webhooks)``: in the wing's database if it has
    # records, else in the first.
    known = databases()
    operation = Operation(
        "", "", b"", database=named["using"] if named["using"] in known else known[0]
    )
    counters.count(
        event.counted_as, f"({family.name} {sender})", operation, named["count"]
    )


def prune(*, using: str | None = None) -> int:
    """Delete some of the oldest counters past ``STATS_RETENTION``; return how many were
    deleted.
    """
    return models.prune(
        IdempotencyCounter, "since", options().stats_retention or 0, using
    )


counters = Counters()
os.register_at_fork(after_in_child=counters._reset)
