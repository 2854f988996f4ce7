"""Deferred operations as operators see them. They are deleted and encrypted anew
together with the record of their request, unless they are still to be run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, Min, QuerySet, Value
from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.contrib.operations.deferring import opened, seal
from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.contrib.operations.status import RUNNING, status_of
from django_idempotency.extending.figures import Gauge, GaugeFamily, amount
from django_idempotency.extending.operators import (
    Act,
    Companion,
    progress_of,
    records,
)
from django_idempotency.extending.stores import (
    TERMINAL,
    DatabaseNow,
    Status,
    has_newest_key,
)

OVERDUE = timedelta(minutes=10)
MOST = 10_000


def _waiting(using: str) -> QuerySet[DeferredOperation]:
    return DeferredOperation.objects.using(using).filter(due_at__isnull=False)


class DeferredOfRecords(Companion):
    def delete(self, ids: Collection[UUID], using: str) -> None:
        """Leave what is still to be run, as records of running operations are left."""
        ended = DeferredOperation.objects.using(using).filter(
            record_id__in=ids, due_at=None
        )
        own = [each.own_id for each in ended.only("scope", "key")]
        results = records(using).filter(pk__in=own, status__in=TERMINAL, on_hold=False)
        results._raw_delete(using)
        ended._raw_delete(using)

    def decided(self, record: Any, act: str) -> None:
        """Have a worker look at once; an allowed retry has all its attempts again."""
        mine = _waiting(record._state.db).filter(key=record.key, scope=record.scope)
        mine.update(due_at=DatabaseNow())
        if act == Act.ALLOW_RETRY:
            mine.update(attempts_before=record.attempts)

    def events(self, record: Any) -> Iterator[tuple[datetime, str | Promise]]:
        if deferred := DeferredOperation.of(record):
            text = gettext_lazy("operation {name} was deferred")
            yield deferred.created_at, format_lazy(text, name=deferred.name)

    def exported(self, record: Any, *, bodies: bool) -> dict[str, Any]:
        if (each := DeferredOperation.of(record)) is None:
            return {}
        text = (opened(each) or b"").decode() if bodies else None
        due = each.due_at and each.due_at.isoformat()
        return {"deferred": {"name": each.name, "due_at": due, "arguments": text}}

    def progress(self, record: Any) -> dict[str, Any]:
        if (each := DeferredOperation.of(record)) is None:
            return {}
        own = records(record._state.db).filter(pk=each.own_id).first()
        shown = {"operation": each.name, "status": RUNNING, "attempt": 0}
        if own is None:
            return shown
        shown |= {"attempt": own.attempts, **progress_of(own)}
        if own.status == Status.FAILED and own.response_status is None:
            own.status = Status.PROCESSING  # before the next attempt
        return shown | {"status": status_of(own)}

    def reencrypt(self, using: str) -> int:
        count = 0
        for each in _waiting(using).iterator():
            if has_newest_key(each.headers):
                continue
            if (text := opened(each)) is not None:
                seal(each, text)
                same = _waiting(using).filter(pk=each.pk, key=each.key)
                count += same.update(headers=each.headers, arguments=each.arguments)
        return count


DEFERRED = DeferredOfRecords()


GAUGES = (
    Gauge(
        "operations_waiting",
        "deferred operations that have not ended",
        {"": "waiting"},
        unit="{operation}",
    ),
    Gauge(
        "operations_age",
        "age of the oldest deferred operation that has not ended",
        {"": "age"},
        unit="s",
    ),
)


def _by_name(using: str) -> dict[str, dict[str, float]]:
    found = _waiting(using).values("name").order_by("name")
    counted = found.annotate(count=Count("pk"), since=Min("created_at"))
    return {
        one["name"]: {
            "waiting": one["count"],
            "age": (one["now"] - one["since"]).total_seconds(),
        }
        for one in counted.annotate(now=DatabaseNow())
    }


FAMILY = GaugeFamily("operations", "operation", GAUGES, _by_name)


def alarms(using: str) -> list[Any]:
    """Return the alarm of operations that no worker takes."""
    from django_idempotency.extending.admin import Alarm  # which needs Django's admin

    since = DatabaseNow() - Value(OVERDUE)
    count = _waiting(using).filter(due_at__lt=since)[:MOST].count()
    text = _("%(count)s deferred operations wait for a worker")
    return [Alarm(text % {"count": amount(count, MOST)})] if count else []
