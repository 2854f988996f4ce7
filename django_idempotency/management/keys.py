"""Find the records of a key, in all databases and stores, and say how they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any
from uuid import UUID

from django_idempotency.maintenance.advice import Standing, advice, shown_reason, standing, standing_of
from django_idempotency.maintenance.decisions import Act, Refusal, objection
from django_idempotency.maintenance.owners import shown_owner
from django_idempotency.maintenance.records import Records, record_of, records
from django_idempotency.maintenance.timeline import Event, timeline
from django_idempotency.models import TERMINAL, DatabaseNow, RowLocked, Status
from django_idempotency.reporting.traces import Trace
from django_idempotency.stats.formatting import age
from django_idempotency.stores import Store
from django_idempotency.values.keys import is_record_id, record_id
from django_idempotency.values.moments import in_zone
from django_idempotency.values.printable import printable

# Each uses an index. What an operator has to decide on comes first.
SITUATIONS: dict[str, Callable[[Records], list[Records]]] = {
    "waiting": lambda rows: [rows.awaiting_operator(), rows.abandoned()],
    "on_hold": lambda rows: [rows.awaiting_operator()],
    "stuck": lambda rows: [rows.abandoned()],
    "live": lambda rows: [rows.live().order_by("locked_until")],
    "retryable": lambda rows: [
        rows.filter(status=Status.FAILED, response_status__isnull=True, on_hold=False).order_by("-updated_at")
    ],
    "ended": lambda rows: [rows.filter(status__in=TERMINAL, response_status__isnull=False).order_by("-purge_at")],
}
STANDINGS = {
    "waiting": (Standing.ON_HOLD, Standing.LAPSED),
    "on_hold": (Standing.ON_HOLD,),
    "stuck": (Standing.LAPSED,),
    "live": (Standing.RUNNING, Standing.LAPSED),
    "retryable": (Standing.RETRYABLE,),
    "ended": (Standing.FAILED, Standing.COMPLETED),
}
SHOWN = (
    *("id", "scope", "key", "method", "path", "mode", "status", "attempts", "on_hold", "reason", "created_at"),
    *("locked_at", "locked_until", "updated_at", "expires_at", "purge_at", "replays", "response_status"),
)
LINE = "{standing:14} {age:>12}  {attempts:>3}  {scope}  {key}  {method} {path}  {reason}"
WIDTH = 14


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and where it is: the alias of its database, or of its store."""

    alias: str
    store: Store | None
    record: Any


def read(rows: Records) -> Any:
    """Return ``rows`` with the columns that operators see."""
    return rows.defer("response_body").annotate(now=DatabaseNow(), locked=RowLocked())


def listed(using: str, store: Store | None, situation: str) -> Iterator[Any]:
    """Yield the records in a ``situation``."""
    if store is None:
        return chain.from_iterable(SITUATIONS[situation](read(records(using))))
    return (record_of(found) for found in store.records() if standing(found) in STANDINGS[situation])


def found_in(using: str, store: Store | None, *, key: str | None, scope: str | None, id: UUID | None) -> list[Any]:
    """Return the records of a key, in any scope, or the one with an id."""
    if store is None:
        rows = records(using)
        return list(read(rows.with_key(key) if key is not None else rows.filter(pk__in=_ids(id))).order_by("pk"))
    if key is not None and scope is None:
        return [record_of(snapshot) for snapshot in store.records() if snapshot.key == key]
    ids = [record_id(scope or "", key)] if key is not None else _ids(id)
    return [record_of(snapshot) for snapshot in map(store.read, ids) if snapshot]


def _ids(id: UUID | None) -> list[UUID]:
    return [id] if id is not None and is_record_id(id) else []


def objection_to(act: Act, record: Any) -> Refusal | None:
    """Return why ``act`` can't be done to a record that was read with ``now`` and ``locked``."""
    why = objection(record, act, record.now)
    return Refusal.BUSY if why is None and record.locked and act != Act.EXTEND else why


def why_not(record: Any, why: Refusal | None) -> str:
    """Say that nothing was done to a record, how it stands, and what is safe to do."""
    advised = advice(record)
    clear = why is None or why in (Refusal.LIVE, Refusal.HAS_RESPONSE, Refusal.FREE)  # the advice says it
    what = advised.what if clear else f"{why.label} {advised.what}"  # type: ignore[union-attr]
    return f"Nothing was done to {record}. {what}\nSafe to do now: {advised.safe}"


def facts_of(record: Any) -> dict[str, Any]:
    """Return what a JSON report says about a record. It has neither its response nor its token or fingerprint."""
    facts = {name: getattr(record, name) for name in SHOWN}
    return facts | {"standing": str(standing_of(record)), "age": round(_seconds(record))}


def _seconds(record: Any) -> float:
    """Return for how many seconds the record has been in its state: since its claim, or since its end."""
    seconds: float = (record.now - (record.locked_at or record.updated_at)).total_seconds()
    return seconds


def line(record: Any) -> str:
    """Return the line of a list about a record."""
    texts = {name: printable(getattr(record, name)) for name in ("scope", "key", "method", "path")}
    standing = str(standing_of(record).label)
    spent, attempts, reason = age(_seconds(record)), record.attempts, shown_reason(record)
    return LINE.format(standing=standing, age=spent, attempts=attempts, reason=reason, **texts).rstrip()


def described(record: Any) -> tuple[dict[str, Any], str]:
    """Return what there is to say about a record: as facts, and in words."""
    advised, owner, events = advice(record), shown_owner(record), timeline(record, record.now)
    trace = Trace.of(record.trace)
    facts = facts_of(record) | {
        "what": advised.what,
        "by_itself": advised.by_itself,
        "safe": advised.safe,
        "owner": owner,
        "trace": asdict(trace) | {"url": trace.url} if trace else None,
        "events": [{"at": event.at, "what": str(event.what), "by": event.by} for event in events],
    }
    texts = {
        "what it is": advised.what,
        "by itself": advised.by_itself,
        "safe to do now": advised.safe,
        "current owner": owner,
        "request": f"{record.method} {record.path}".strip(),
        "mode": str(record.get_mode_display()),
        "attempts": str(record.attempts),
        "trace": " ".join(filter(None, (trace.trace_id, trace.url))) if trace else "",
        "record id": str(record.pk),
    }
    lines = [f"{record}: {standing_of(record).label}"]
    lines += [f"  {name:{WIDTH}}  {printable(text)}" for name, text in texts.items() if text]
    return facts, "\n".join([*lines, "  what happened", *map(_line_of, events)])


def _line_of(event: Event) -> str:
    at = in_zone(event.at).isoformat(" ", "seconds") if event.at else "at a time not kept"
    by = f" (by {event.by})" if event.by else ""
    return printable(f"    {at}  {event.what}{by}")
