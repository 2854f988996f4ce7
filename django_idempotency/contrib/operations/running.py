"""Run deferred operations, and say what became of them.

An operation is a message to its function, and so has a record of its own, by which it
is done once. However often a worker hears of it, that record decides.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import QuerySet, Value

from django_idempotency import Body, Hold, Message
from django_idempotency.contrib.operations.deferring import opened
from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.contrib.operations.registry import Deferrable, find
from django_idempotency.contrib.operations.signals import operation_due
from django_idempotency.extending import conf, log
from django_idempotency.extending.brokers import PLAIN_JSON, final
from django_idempotency.extending.stores import (
    DatabaseNow,
    DatabaseStore,
    EntryPoint,
    IdempotencyRecord,
    Snapshot,
    Store,
    StoredResponse,
    configured,
)
from django_idempotency.messages import (
    AwaitsOperator,
    Consumer,
    Delivery,
    RejectMessage,
    RetryLater,
)

AGAIN = 60.0  # seconds after which a worker may have lost an operation, or not know it
UNDECIDED = 3600.0  # seconds; a decision makes the operation due at once
ACCEPTED = 202
DEFAULT = "default"
UNLIMITED = 1_000_000  # attempts, which are counted here


@dataclass(frozen=True, eq=False)
class _Operation(Consumer):
    scope: str = ""

    def scope_of(self, message: Message) -> str:
        return self.scope

    def after_mismatch(self, *, running: bool) -> RetryLater:
        """Keep the operation. Its arguments are its own, but the digest of them may be
        keyed with a key that is not in the settings any more.
        """
        return RetryLater(AGAIN, "its arguments can't be compared with its record's")


def run_operation(record_id: UUID | str, *, using: str) -> Delivery | None:
    """Run the operation that the request of the record ``record_id`` has deferred, in
    the database ``using``, unless it has ended or runs elsewhere. Return its
    outcome; ``None`` if there is nothing to do, or if this process does not know it.

    Not inside ``transaction.atomic()``.
    """
    rows = DeferredOperation.objects.using(using).filter(pk=record_id)
    waiting = rows.filter(due_at__isnull=False).first()
    if waiting is None:
        return None
    known, text = find(waiting.name), opened(waiting)
    if known is None or text is None:
        why = "its arguments can't be decrypted" if known else "its name is unknown"
        message = "a deferred operation is not run: %s"
        log(logging.ERROR, "operation_put_back", message, why, view=waiting.name)
        _put_off(rows, AGAIN)
        return None
    mine = rows.filter(key=waiting.key)  # a later life of the request's key is not
    delivery = _consumer(known, waiting, mine).consume(
        # by record, which counts the attempts of workers that died
        Message(waiting.name, waiting.key, text, redelivered=True)
    )
    if isinstance(delivery, AwaitsOperator):
        _put_off(mine, UNDECIDED)
    elif isinstance(delivery, RetryLater):
        _put_off(mine, delivery.delay)
    else:
        _end(mine)
        if not IdempotencyRecord.objects.using(using).filter(pk=record_id).exists():
            mine.filter(due_at=None).delete()
    return delivery


def _put_off(rows: QuerySet[DeferredOperation], seconds: float) -> None:
    later = DatabaseNow() + Value(timedelta(seconds=max(1.0, seconds)))
    rows.filter(due_at__isnull=False).update(due_at=later)


def _end(rows: QuerySet[DeferredOperation]) -> None:
    rows.update(due_at=None, headers=[], arguments=None)


def _consumer(
    known: Deferrable,
    waiting: DeferredOperation,
    rows: QuerySet[DeferredOperation],
) -> _Operation:
    most = known.max_attempts + waiting.attempts_before
    # The policy of the view is not known here, so encrypt as its arguments are.
    body = Body(encrypt=conf().policy.body.encrypt or bool(conf().encryption))

    def handle(message: Message, context: Any) -> Any:
        if context.attempt > most:
            raise Hold(f"{context.attempt - 1} attempts failed or were cut short")
        try:
            result = final(known.function(**json.loads(message.body)))
            if context.policy.is_atomic:  # else its effects have happened
                PLAIN_JSON.encode(result)
        except (RejectMessage, Hold):
            raise
        except Exception as error:
            if context.attempt < most:
                raise
            what = f"{type(error).__name__}: {error}".strip(": ")
            raise Hold(f"attempt {context.attempt} failed: {what}") from error
        if context.policy.is_atomic:
            _end(rows)
        return result

    return _Operation(
        known.name,
        handle,
        policy=known.policy.derive(
            retention=waiting.retention, using=rows.db, store=_store(), body=body
        ),
        max_attempts=UNLIMITED,
        backoff=known.backoff,
        sender=known.function,
        entry_point=EntryPoint.FUNCTION,
        scope=waiting.scope,
    )


def _store() -> str:
    """Return the alias of a store in the database, where the request's record is."""
    aliases = (conf().policy.store, DEFAULT, *conf().stores)
    return next(each for each in aliases if configured(each).backend.transactional)


# --- What is due ----------------------------------------------------------------------


def take(using: str, most: int = 1) -> list[DeferredOperation]:
    """Return operations that are due, which no one else gets for a minute."""
    skips = connections[using].features.has_select_for_update_skip_locked
    rows = DeferredOperation.objects.using(using)
    with transaction.atomic(using=using):
        due = rows.filter(due_at__lte=DatabaseNow()).order_by("due_at")
        taken = list(due.only("name").select_for_update(skip_locked=skips)[:most])
        _put_off(rows.filter(pk__in=[each.pk for each in taken]), AGAIN)
    return taken


@dataclass(frozen=True, slots=True)
class Hinted:
    hinted: int


def hint(using: str, most: int = 1000) -> Hinted:
    """Send ``operation_due`` again for operations that are due: an earlier hint may
    have been lost.
    """
    taken = take(using, most)
    for each in taken:
        operation_due.send_robust(each.name, record_id=each.pk, using=using)
    return Hinted(len(taken))


# --- What retries of the request get --------------------------------------------------


def as_ended(
    response: StoredResponse, record: Snapshot, store: Store
) -> StoredResponse:
    """Return what the operation has returned, once it is done, in the place of the 202
    that ``record`` keeps.
    """
    if response.status != ACCEPTED or not isinstance(store, DatabaseStore):
        return response
    if all(name != "Location" for name, _value in response.headers):
        return response  # no deferred operation's, so the table is not looked into
    rows = DeferredOperation.objects.using(store.name)
    deferred = rows.filter(pk=record.id).first()
    own = None if deferred is None else store.read(deferred.own_id)
    if deferred is None or own is None or own.response is None:
        return response
    ended = store.decode(own.response, own, deferred.name)
    known = find(deferred.name)
    status = known.status if known and ended.status == 200 else ended.status
    return StoredResponse(status, ended.headers, ended.body)
