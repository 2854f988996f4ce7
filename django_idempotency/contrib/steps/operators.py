"""Steps as operators see them. They are deleted, erased, exported and encrypted anew
together with their record.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db.models import (
    DurationField,
    Exists,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
)
from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.contrib.steps.memos import binding
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.values import (
    KINDS,
    StepError,
    declared,
    held_by,
)
from django_idempotency.extending import FOR_GOOD, conf
from django_idempotency.extending.figures import Gauge, GaugeFamily, amount
from django_idempotency.extending.operators import (
    Act,
    Companion,
    is_sharded,
    records,
)
from django_idempotency.extending.stores import (
    Binding,
    DatabaseNow,
    IdempotencyRecord,
    Status,
    StoredResponse,
    decoded,
    encrypted,
    has_newest_key,
    in_utc,
)

OVERDUE = timedelta(days=1)
MOST = 10_000  # to count, or to look for orphans among
# the steps of the present life of a record
OF_RECORD = Step.objects.filter(
    record_id=OuterRef("pk"), generation=OuterRef("created_at")
)


def steps_of(record: Any) -> QuerySet[Step]:
    """Return the steps of the present life of ``record``."""
    steps = Step.objects.using(record._state.db).order_by("started_at")
    return steps.filter(record_id=record.pk, generation=record.created_at)


def _bound(step: Step, name: str, using: str) -> Binding:
    return binding(step.record_id, in_utc(step.generation, using), name)


def opened(step: Step, using: str) -> bytes | None:
    stored = StoredResponse.of(200, step.headers, step.result)
    return decoded(stored, _bound(step, step.name, using)).body


def sealed(text: bytes, step: Step, name: str, using: str) -> dict[str, Any]:
    """Return the columns of a result under ``name``, encrypted if there is a key."""
    of, plain = _bound(step, name, using), StoredResponse(200, (), text)
    stored = encrypted(plain, of) if conf().encryption else plain
    if stored is None:
        raise StepError("The result can't be encrypted; the log says why.")
    return {"headers": stored.headers, "result": stored.body}


class StepsOfRecords(Companion):
    def delete(self, ids: Collection[UUID], using: str) -> None:
        Step.objects.using(using).filter(record_id__in=ids)._raw_delete(using)

    def empty(self, ids: Collection[UUID], using: str) -> None:
        rows = Step.objects.using(using).filter(record_id__in=ids)
        rows.update(headers=[], result=None)

    def unfinished(self, ids: Collection[UUID], using: str) -> Collection[UUID]:
        if is_sharded(using):
            return ()
        return unfinished(using).filter(pk__in=ids).values_list("pk", flat=True)

    def decided(self, record: Any, act: str) -> None:
        """An allowed retry means what the reason of the hold asks: the step was not
        done, or the new code may go on.
        """
        if act != Act.ALLOW_RETRY or not record.on_hold:
            return
        kind, name = held_by(record.reason)
        if kind == "code_changed":
            steps_of(record).update(optional=True)
        if kind in ("outcome_unknown", "transaction_ended"):
            undone = steps_of(record).filter(name=name, finished_at=None)
            undone._raw_delete(record._state.db)

    def events(self, record: Any) -> Iterator[tuple[datetime, str | Promise]]:
        begun = gettext_lazy("step {name} began in attempt {attempt}, and may run once")
        done = gettext_lazy(
            "step {name} was done in attempt {attempt}, in {seconds} s: {size} bytes"
        )
        for step in steps_of(record):
            at = step.finished_at or step.started_at
            yield (
                at,
                format_lazy(
                    done if step.finished_at else begun,
                    name=step.name,
                    attempt=step.attempt,
                    seconds=round((at - step.started_at).total_seconds(), 3),
                    size=len(step.result or b""),
                ),
            )

    def exported(self, record: Any, *, bodies: bool) -> dict[str, Any]:
        return {"steps": [self._exported(s, record, bodies) for s in steps_of(record)]}

    def _exported(self, step: Step, record: Any, bodies: bool) -> dict[str, Any]:
        finished = step.finished_at and step.finished_at.isoformat()
        text = opened(step, record._state.db) if bodies else None
        return {
            "name": step.name,
            "attempt": step.attempt,
            "started_at": step.started_at.isoformat(),
            "finished_at": finished,
            **({"result": text and json.loads(text)} if bodies else {}),
        }

    def progress(self, record: Any) -> dict[str, Any]:
        done = steps_of(record).exclude(finished_at=None).order_by("-finished_at")
        name = done.values_list("name", flat=True).first()
        return {} if name is None else {"step": declared(name)}

    def reencrypt(self, using: str) -> int:
        count = 0
        rows = Step.objects.using(using).exclude(headers=[]).exclude(result=None)
        for step in rows.iterator():
            if has_newest_key(step.headers):
                continue
            if (text := opened(step, using)) is not None:
                again = sealed(text, step, step.name, using)
                count += rows.filter(pk=step.pk).update(**again)
        return count


STEPS = StepsOfRecords()

# --- What is left ---------------------------------------------------------------------


def unfinished(using: str) -> QuerySet[IdempotencyRecord]:
    """Return the records of operations that are done in part, and wait for a retry, the
    one that has waited longest first.
    """
    undecided = Q(status=Status.FAILED, response_status=None, on_hold=False)
    # which most records that failed are not: so their steps are not looked for
    kept = Q(expires_at__gt=DatabaseNow() + Value(timedelta(seconds=FOR_GOOD / 2)))
    found = records(using).filter(undecided, kept, Exists(OF_RECORD))
    return found.order_by("updated_at")


def alarms(using: str) -> list[Any]:
    """Return the alarms of operations that have been done in part for a day or more,
    and of keys that steps have put on hold.
    """
    from django_idempotency.extending.admin import Alarm  # which needs Django's admin

    if is_sharded(using):  # where steps are refused, and no join is possible
        return []
    since = DatabaseNow() - Value(OVERDUE)
    overdue = unfinished(using).filter(updated_at__lt=since)[:MOST].count()
    held = Counter(kind for kind, _step in _holds(using))
    found = (
        (_("%(count)s done in part for more than a day"), overdue, "retryable"),
        (_("%(count)s on hold: the code changed"), held["code_changed"], "on_hold"),
        (
            _("%(count)s on hold: a step’s outcome is unknown"),
            held["outcome_unknown"] + held["transaction_ended"],
            "on_hold",
        ),
    )
    return [
        Alarm(text % {"count": amount(count, MOST)}, situation)
        for text, count, situation in found
        if count
    ]


def _holds(using: str) -> list[tuple[str, str]]:
    """Return the kind and the step of each hold by a step."""
    reasons = records(using).awaiting_operator().values_list("reason", flat=True)
    return [held for held in map(held_by, reasons[:MOST]) if any(held)]


GAUGES = (
    Gauge(
        "steps_unfinished",
        "operations that are done in part and wait for a retry, by the last step that"
        " is done; 10,000 means or more",
        {"": "unfinished"},
    ),
    Gauge(
        "steps_unfinished_age",
        "for how long the oldest of these has waited",
        {"": "age"},
        unit="s",
    ),
    Gauge(
        "steps_on_hold",
        "keys that a step has put on hold, by reason; 10,000 means or more",
        {kind: kind for kind in KINDS},
        by="reason",
    ),
)


def figures(using: str) -> dict[tuple[str, str], Mapping[str, float]]:
    """Return the figures by database and by the name of a step before a colon."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    if is_sharded(using):
        return {}
    last = Subquery(OF_RECORD.order_by("-finished_at").values("name")[:1])
    age = ExpressionWrapper(DatabaseNow() - F("updated_at"), DurationField())
    for step, waited in unfinished(using).values_list(last, age)[:MOST]:
        of = found[using, declared(step)]
        of["unfinished"] = of.get("unfinished", 0) + 1
        of["age"] = max(of.get("age", 0), waited.total_seconds())
    for kind, step in _holds(using):
        of = found[using, declared(step)]
        of[kind] = of.get(kind, 0) + 1
    return {**found}


FAMILY = GaugeFamily("steps", ("database", "step"), GAUGES, figures)


def prune(using: str) -> None:
    """Delete steps whose record is gone, or began a new life, from a part of the table
    that is chosen at random.
    """
    if is_sharded(using):
        return
    steps = Step.objects.using(using).order_by("record_id", "generation", "name")
    alive = IdempotencyRecord.objects.filter(
        pk=OuterRef("record_id"), created_at=OuterRef("generation")
    )
    chosen = uuid4()
    for part in (Q(record_id__gte=chosen), Q(record_id__lt=chosen)):
        examined = steps.filter(part).annotate(is_alive=Exists(alive))[:MOST]
        for step in [step for step in examined.defer("result") if not step.is_alive]:
            steps.filter(pk=step.pk).filter(~Exists(alive))._raw_delete(using)
