"""What an operator decides about dead letters: to have them tried again, or to delete them for good."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.contrib.outbox.signals import outbox_requeued
from django_idempotency.maintenance.decisions import Refusal, lacks_second
from django_idempotency.maintenance.history import lacks_note, write_entry
from django_idempotency.models import DatabaseNow
from django_idempotency.reporting.events import send_several

AT_ONCE = 500


class Act(StrEnum):
    REQUEUE = "requeue"
    DISCARD = "discard"

    @property
    def permission(self) -> str:
        """The permission that a user needs for it."""
        return f"django_idempotency_outbox.{'change' if self is Act.REQUEUE else 'delete'}_outboxevent"


ENTRIES = {Act.REQUEUE: "Requeued.", Act.DISCARD: "Discarded."}


def version(event: OutboxEvent) -> str:
    """Return a text that differs each time that ``event`` is given up."""
    return f"{event.attempts} {event.given_up_at}"


def decide(
    act: Act, letters: QuerySet[OutboxEvent], *, by: Any = None, note: str = "", seen: Mapping[str, str] | None = None
) -> tuple[int, Counter[Refusal]]:
    """Do ``act`` to dead letters, some at a time, each time in one transaction with the entries in their history.

    Return for how many it was done, and how many were refused, by reason.

    A requeued event takes the route of today, is tried ``max_attempts`` times less one, and still comes before the
    later ones of its key. The later events of the key of a discarded one go on.

    ``letters``: from ``dead_letters()``. ``by``: the user who decides, or a name. ``note``: why, for the history.
    ``seen``: by primary key, the ``version()`` of each; others are refused. ``DECISIONS`` asks for what it asks for
    with keys.
    """
    if lacks_note(note):
        return 0, Counter({Refusal.NO_NOTE: letters.count()})
    done, refused = 0, Counter[Refusal]()
    ids = list(letters.order_by("pk").values_list("pk", flat=True))
    for first in range(0, len(ids), AT_ONCE):
        with transaction.atomic(using=letters.db):
            rows = letters.filter(pk__in=ids[first : first + AT_ONCE]).select_for_update()
            agreed = list[OutboxEvent]()
            for event in rows.defer("payload", "headers").annotate(now=DatabaseNow()):
                if seen is not None and seen.get(str(event.pk)) != version(event):
                    refused[Refusal.CHANGED] += 1
                elif why := lacks_second(event, f"{act} {version(event)}", act.permission, by=by, note=note):
                    refused[why] += 1
                else:
                    write_entry(event, by, f"{ENTRIES[act]} {note}".strip())
                    agreed.append(event)
            if act is Act.REQUEUE:
                _requeue(agreed, letters.db)
            else:
                OutboxEvent.objects.using(letters.db).filter(pk__in=[event.pk for event in agreed]).delete()
            done += len(agreed)
    return done, refused


def _requeue(events: Sequence[OutboxEvent], using: str) -> None:
    ids: dict[str, list[int]] = defaultdict(list)
    for event in events:
        ids[options().publisher_of(event.topic)].append(event.pk)
    fresh = {"status": Status.PENDING, "attempts": 1, "given_up_at": None, "available_at": DatabaseNow()}
    for publisher, of_publisher in ids.items():
        rows = OutboxEvent.objects.using(using).filter(pk__in=of_publisher)
        send = partial(send_several, outbox_requeued, publisher, rows.update(publisher=publisher, **fresh), using)
        transaction.on_commit(send, using=using, robust=True)
