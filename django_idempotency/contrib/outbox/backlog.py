"""Read the events of a relay's lanes, and note what became of them. No lock and no
transaction stays open.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Exists, Min, OuterRef, Q, QuerySet
from django.db.models.functions import Length

from django_idempotency.contrib.outbox.conf import OutboxOptions
from django_idempotency.contrib.outbox.models import Lane, OutboxEvent, Status
from django_idempotency.contrib.outbox.publishing import opened
from django_idempotency.extending.brokers import Event, Postponed, Refused
from django_idempotency.extending.stores import DatabaseNow, ahead

TABLE = OutboxEvent._meta.db_table
COLUMNS = (
    "id",
    "event_id",
    "topic",
    "key",
    "payload",
    "content_type",
    "headers",
    "lane",
    "attempts",
)

# of the payloads that are read at a time, before the last one
MOST_BYTES = 16 * 1024 * 1024

# An event is passed over while an earlier one of its key has failed.
FREE = f"""(key = '' OR NOT EXISTS (
    SELECT 1 FROM {TABLE} AS failed
    WHERE failed.publisher = later.publisher AND failed.lane = later.lane
        AND failed.key = later.key
        AND failed.id < later.id AND failed.key <> '' AND failed.attempts > 0
        AND failed.status IN ('{Status.PENDING}', '{Status.DEAD}')
))"""
OF_LANE = f"""
SELECT {", ".join(COLUMNS)} FROM {TABLE} AS later
WHERE publisher = %(publisher)s AND lane = lane.number AND status = '{Status.PENDING}'
    AND {FREE}
"""

# Each lane is read from its own beginning, by the index of events that were never
# tried. Those that have failed and are due are read by an index of their own, and get
# no more than a share: they may be many, and fail again.
READ = f"""
WITH lane (number, after) AS (SELECT * FROM unnest(%(lanes)s::smallint[],
    %(after)s::bigint[])), found AS (
    (SELECT event.* FROM lane CROSS JOIN LATERAL (
        {OF_LANE} AND attempts = 0 AND id > lane.after ORDER BY id LIMIT %(share)s
    ) AS event ORDER BY id LIMIT %(limit)s)
    UNION ALL
    (SELECT event.* FROM lane CROSS JOIN LATERAL (
        {OF_LANE} AND attempts > 0 AND available_at <= statement_timestamp()
            ORDER BY available_at LIMIT %(share)s
    ) AS event ORDER BY id LIMIT %(retries)s)
)
SELECT {", ".join(COLUMNS)} FROM (
    SELECT *, sum(octet_length(payload)) OVER (PARTITION BY attempts > 0
        ORDER BY id) - octet_length(payload) AS before
    FROM found
) AS sized WHERE before < {MOST_BYTES} ORDER BY id
"""
RETRIES = 4  # of the events that are read, at most one in four has failed before
# events to read of a lane: a few lanes keep a relay busy, and no single one fills it
LANES_LEAST = 32

HEADS = f"""
SELECT lane.number, min(head.id) FROM unnest(%s::smallint[]) AS lane (number)
CROSS JOIN (VALUES ('{Status.PENDING}'), ('{Status.DEAD}')) AS state (name)
CROSS JOIN LATERAL (
    SELECT id FROM {TABLE}
    WHERE publisher = %s AND status = state.name AND lane = lane.number
        AND attempts >= 1 AND status IN ('{Status.PENDING}', '{Status.DEAD}')
    ORDER BY id LIMIT 1
) AS head GROUP BY 1
"""

# One parameter for any number of ids: it takes milliseconds to parse a statement with
# hundreds of parameters.
DELETE = f"DELETE FROM {TABLE} WHERE id = ANY(%s)"


class Backlog:
    """The events of one publisher in one database."""

    def __init__(self, publisher: str, using: str, options: OutboxOptions) -> None:
        self.publisher = publisher
        self.using = using
        self.options = options

    @property
    def events(self) -> QuerySet[OutboxEvent]:
        return OutboxEvent.objects.using(self.using).filter(publisher=self.publisher)

    def read(self, after: Mapping[int, int], limit: int) -> list[Event]:
        """Return the next events to send, in order: from each lane, those with an id
        above the one in ``after``.
        """
        if not after:
            return []
        if connections[self.using].vendor == "postgresql":
            return self._read_by_lane(after, limit)
        return self._read_all(after, limit)

    def _read_by_lane(self, after: Mapping[int, int], limit: int) -> list[Event]:
        values: dict[str, Any] = {
            "lanes": list(after),
            "after": list(after.values()),
            "publisher": self.publisher,
        }
        values |= {
            "share": max(LANES_LEAST, 2 * limit // len(after)),
            "limit": limit,
            "retries": -(-limit // RETRIES),
        }
        with connections[self.using].cursor() as cursor:
            cursor.execute(READ, values)
            return [_event(row) for row in cursor.fetchall()]

    def _read_all(self, after: Mapping[int, int], limit: int) -> list[Event]:
        failed = OutboxEvent.objects.using(self.using).filter(
            publisher=OuterRef("publisher"),
            lane=OuterRef("lane"),
            key=OuterRef("key"),
            id__lt=OuterRef("id"),
            attempts__gt=0,
        )
        found = (
            self.events.filter(lane__in=after, status=Status.PENDING)
            .filter(
                Q(attempts=0, id__gt=min(after.values()))
                | Q(attempts__gt=0, available_at__lte=DatabaseNow())
            )
            .filter(Q(key="") | ~Exists(failed))
            .order_by("id")
        )
        read, size = list[int](), 0
        for id, payload in found.values_list("id", Length("payload"))[:limit]:
            if size >= MOST_BYTES:
                break
            read.append(id)
            size += payload
        return [
            _event(row)
            for row in (
                self.events.filter(pk__in=read).order_by("id").values_list(*COLUMNS)
            )
        ]

    def held_back(self, lanes: Collection[int]) -> dict[int, int]:
        """Return, by lane, the id of its first failed event, behind which others may be
        held back.
        """
        if connections[self.using].vendor == "postgresql":
            with connections[self.using].cursor() as cursor:
                cursor.execute(HEADS, [list(lanes), self.publisher])
                return dict(cursor.fetchall())
        failed = self.events.filter(lane__in=lanes, attempts__gt=0)
        return dict(failed.values_list("lane").annotate(first=Min("id")))

    # --- What became of them ----------------------------------------------------------

    def note_confirmed(self, events: Sequence[Event]) -> None:
        """Delete exactly these, even if another relay holds their lane by now."""
        ids = [event.position for event in events]
        if connections[self.using].vendor == "postgresql":
            with connections[self.using].cursor() as cursor:
                cursor.execute(DELETE, [ids])
            return
        # One by one: with many ids, MariaDB may read the whole table, and wait for rows
        # that are not committed yet.
        with transaction.atomic(using=self.using):
            for id in ids:
                self.events.filter(pk=id)._raw_delete(self.using)

    def note_refused(self, refused: Iterable[Refused], relay: UUID) -> tuple[int, int]:
        """Count an attempt for each event, and try it again later or give it up.

        Return how many are to be tried again, and how many were given up. A relay that
        has lost its lanes changes nothing.
        """
        alike: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
        for refusal in refused:
            attempts = refusal.event.attempts + 1
            dead = refusal.permanent or attempts >= self.options.max_attempts
            alike[attempts, _storable(refusal.reason), dead].append(
                refusal.event.position
            )
        counts = {True: 0, False: 0}  # by whether they are dead
        with transaction.atomic(using=self.using):
            for (attempts, reason, dead), ids in alike.items():
                delay = delay_after(attempts, self.options)
                counts[dead] += self._fail(
                    ids, attempts, reason, relay, None if dead else delay
                )
        return counts[False], counts[True]

    def note_postponed(self, postponed: Iterable[Postponed], relay: UUID) -> None:
        """Try each event again after its delay, together with those that have failed,
        so that it is in nobody's way.
        """
        alike: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for outcome in postponed:
            event, reason = outcome.event, _storable(outcome.reason)
            # read as one that has failed, but not counted
            kind = max(1, event.attempts), reason, math.ceil(outcome.delay)
            alike[kind].append(event.position)
        with transaction.atomic(using=self.using):
            for (attempts, reason, delay), ids in alike.items():
                self._fail(ids, attempts, reason, relay, delay)

    def _fail(
        self,
        ids: list[int],
        attempts: int,
        reason: str,
        relay: UUID,
        delay: float | None,
    ) -> int:
        """Note it for those events that this relay has. ``delay``: seconds, or ``None``
        to give them up.
        """
        ours = Lane.objects.using(self.using).filter(
            publisher=self.publisher, number=OuterRef("lane"), relay_id=relay
        )
        rows = self.events.filter(Exists(ours), pk__in=ids, status=Status.PENDING)
        if delay is None:
            over = {
                "status": Status.DEAD,
                "given_up_at": DatabaseNow(),
                "available_at": None,
            }
            return rows.update(attempts=attempts, error=reason, **over)
        return rows.update(attempts=attempts, error=reason, available_at=ahead(delay))


def _storable(reason: str) -> str:
    return reason.replace("\0", "").encode(errors="replace").decode()[:1000]


def delay_after(attempts: int, options: OutboxOptions) -> float:
    """Return the seconds until an event is tried again: doubled with each attempt, up
    to a limit.
    """
    return min(
        options.longest_delay, options.first_delay * 2.0 ** min(attempts - 1, 64)
    )


def _event(row: Sequence[Any]) -> Event:
    """Return the event in ``row``. If its payload can't be decrypted, it stays as it is
    stored.
    """
    position, id, topic, key, payload, content_type, headers, lane, attempts = row
    stored = (
        bytes(payload),
        (json.loads(headers) if isinstance(headers, str) else headers) or {},
    )
    payload, headers = opened(id, *stored) or stored
    return Event(
        position, id, topic, key, payload, content_type, headers, lane, attempts
    )
