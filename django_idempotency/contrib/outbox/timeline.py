"""What a record's operation has published through the outbox, for the record's timeline."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import router
from django.utils.translation import gettext_lazy as _

from django_idempotency.conf import conf
from django_idempotency.contrib.outbox import maintenance
from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.maintenance.timeline import Event
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.printable import printable

MOST = 20


def outbox_events(record: IdempotencyRecord) -> Iterator[Event]:
    """Yield what happened to at most 20, oldest first. Confirmed ones are gone unless ``RETENTION`` keeps them."""
    events = OutboxEvent.objects.using(_database(record)).filter(record_id=record.pk).order_by("id")
    for event in events.defer("payload", "headers")[:MOST]:
        yield Event(event.created_at, _about(_("event {topic} written to the outbox"), event))
        if event.status == Status.DEAD:
            yield Event(event.finished_at, _about(_("event {topic} given up: {error}"), event))
        elif event.finished_at is not None:
            yield Event(event.finished_at, _about(_("event {topic} published"), event))
        elif event.attempts:
            yield Event(event.available_at, _about(_("event {topic} is due to be tried again: {error}"), event))


def _database(record: IdempotencyRecord) -> str:
    """Return the alias of the record's shard if the outbox is in it; otherwise that of the outbox."""
    shard = record._state.db
    if shard and shard in conf().shards and router.allow_migrate_model(shard, OutboxEvent):
        return shard
    return maintenance.database()


def _about(sentence: object, event: OutboxEvent) -> str:
    return str(sentence).format(topic=printable(event.topic), error=printable(event.error))
