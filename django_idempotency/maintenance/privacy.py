"""Erase or export records, for example those of a user who asks for it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack
from uuid import UUID

from django.db.models import Value
from django.db.models.functions import Substr

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.maintenance import history
from django_idempotency.maintenance.cleaner import delete_rows
from django_idempotency.maintenance.records import HAS_BODY, Records, operation_of, record_of, records
from django_idempotency.maintenance.sweep import Batch, Bounds, Pages, Swept, stepwise, sweep
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store
from django_idempotency.stores.codec import stored_response
from django_idempotency.stores.configured import forget
from django_idempotency.values.keys import is_record_id
from django_idempotency.values.outcomes import Snapshot

EXAMINED, EXPORTED = 10_000, 1_000  # records that are read in one statement
Standing = tuple[str, bool]  # the status, and whether it is on hold
TIMES = ("created_at", "updated_at", "locked_at", "locked_until", "expires_at", "purge_at", "last_replayed_at")
COLUMNS = ("scope", "key", "method", "path", "mode", "status", "on_hold", "reason", "attempts", "replays", *TIMES)


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that match everything that is set.

    - ``scope``: a whole scope, as it is stored.
    - ``scope_prefix``: the beginning of a scope, up to a separator, such as ``acme/`` for a tenant.
    - ``key``: a whole key, as the client sent it, in any scope.
    - ``record``: the id of a record.

    Raises ``ValueError`` if nothing is set, if a text is empty, or if the prefix ends with a letter or a digit:
    ``acct:1`` would match ``acct:10``.
    """

    scope: str | None = None
    scope_prefix: str | None = None
    key: str | None = None
    record: UUID | None = None

    def __post_init__(self) -> None:
        stated = [value for field in fields(self) if (value := getattr(self, field.name)) is not None]
        if not stated or "" in stated:
            raise ValueError("Pass scope, scope_prefix, key or record to select records; none may be empty.")
        if self.scope_prefix is not None and self.scope_prefix[-1].isalnum():
            raise ValueError(
                f"scope_prefix is {self.scope_prefix!r}, which may also begin other scopes, such as "
                f"{self.scope_prefix + '0'!r}. End it with a separator, such as '/', or pass the whole scope."
            )

    def matches(self, record: Snapshot) -> bool:
        """Return whether a record of a store outside the database is selected."""
        return (
            self.scope in (None, record.scope)
            and record.scope.startswith(self.scope_prefix or "")
            and self.key in (None, record.key)
            and self.record in (None, record.id)
        )

    def near(self, rows: Records) -> Records:
        """Narrow ``rows`` by their primary key, as far as the selection determines it."""
        if self.key is not None:
            rows = rows.with_key(self.key)
        if self.record is None:
            return rows
        return rows.filter(pk=self.record) if is_record_id(self.record) else rows.none()

    def of(self, rows: Records) -> Records:
        """Return those of ``rows`` that are selected. ``near`` must have narrowed them."""
        if self.scope is not None:
            rows = rows.filter(scope=self.scope)
        if self.scope_prefix is None:
            return rows
        # Not LIKE, which ignores case on SQLite.
        begins = Substr("scope", 1, len(self.scope_prefix))
        return rows.alias(begins=begins).filter(begins=Value(self.scope_prefix))


# --- Erasure ---------------------------------------------------------------------------------------------------------


@stepwise
def erase(
    scope: str | None = None,
    *,
    scope_prefix: str | None = None,
    key: str | None = None,
    record: UUID | None = None,
    bodies: bool = False,
    on_hold: bool = False,
    after: UUID | None = None,
    store: Store | None = None,
    by: Any = None,
    note: str = "",
    **bounds: Unpack[Bounds],
) -> Iterator[Swept]:
    """Erase the records of ``scope``, or of another ``Selection``. A retry with an erased key runs again, as new.

    Scopes have no index, so for those the table is walked in the order of the ids. Records that are started
    or processing, locked or on hold are left alone, and counted. Keys that are created meanwhile may be missed. A cache
    in front of the database no longer replays erased records, either. The texts of the history about erased records are
    replaced.

    - ``bodies``: empty the responses, but keep the records, so that no retry runs again.
    - ``on_hold``: erase records on hold, too. Without ``bodies`` this is a decision: ``DECISIONS`` may require a note,
      or refuse it, because two operators have to decide about each key first.
    - ``after``: continue after the record with this id, at which an earlier run ended.
    - ``store``: a store outside the database, of which all records are read, in one batch. It erases only whole
      records.
    - ``by``, ``note``: who erases records on hold, a user or a name, and why, for the history.

    The other arguments are those of ``Bounds``; the default of ``batch`` is 10,000. Raises ``ValueError`` as
    ``Selection`` does, if ``DECISIONS`` refuses it, and if the store can't erase what is selected.
    """
    selection, dry_run = Selection(scope, scope_prefix, key, record), bounds.get("dry_run", False)
    if on_hold and not bodies:
        _refuse_undecided(note)
    if store is not None:
        if bodies:
            raise ValueError(f"The store {store.name!r} erases only whole records.")
        yield _erase_in_store(store, selection, on_hold, dry_run, by, note)
        return

    def wanted(found: list[tuple[UUID, Standing]]) -> list[UUID]:
        return [id for id, (status, held) in found if status in TERMINAL and (on_hold or not held)]

    def change(rows: Records) -> Batch:
        ended = selection.of(rows).filter(status__in=TERMINAL)
        ended = ended if on_hold else ended.filter(on_hold=False)
        found = list(ended.values_list("pk", "on_hold", DatabaseNow()))
        ids = [id for id, _held, _now in found]
        (_empty if bodies else delete_rows)(records(rows.db).filter(pk__in=ids))
        history.redact(ids)
        for id, held, now in found:
            if held and not bodies:
                history.write_erasure(id, now, by, note)
        return Batch(changed=ids, picked=len(ids))

    pages = Pages(
        lambda: selection.near(records(bounds.get("using"))), lambda rows: _standings(selection.of(rows)), wanted, after
    )
    verb = "emptied" if bodies else "erased"
    for one, swept in sweep(pages, change, bounds, batch=EXAMINED):
        erased = set(wanted(list(one.found)) if dry_run else one.changed)
        cached_for = forget(erased, pages.using) if erased and not dry_run else 0.0
        yield replace(swept, done={verb: len(erased)}, left=_left(one, erased, on_hold), cached_for=cached_for)


def _refuse_undecided(note: str) -> None:
    if history.lacks_note(note):
        raise ValueError("DECISIONS requires a note that says why.")
    if "second_operator" in conf().decisions:
        raise ValueError("DECISIONS requires two operators: have them decide about the keys on hold, then erase these.")


def _standings(rows: Records) -> list[tuple[UUID, Standing]]:
    return [(id, (status, held)) for id, status, held in rows.values_list("pk", "status", "on_hold")]


def _left(batch: Batch, erased: set[UUID], on_hold: bool) -> dict[str, int]:
    rest = [standing for id, standing in batch.found if id not in erased and id not in batch.bad]
    live = sum(status in LIVE for status, _held in rest)
    waiting = 0 if on_hold else sum(held for status, held in rest if status not in LIVE)
    return {"live": live, "on_hold": waiting, "busy": len(rest) - live - waiting}


def _empty(rows: Records) -> object:
    done = rows.filter(response_status__isnull=False)
    done.update(response_headers=[], response_body=None, updated_at=DatabaseNow())
    # Leave updated_at alone: if there is no response yet, it tells how long one will be kept.
    return rows.update(path="", reason="", fingerprint=b"")


def _erase_in_store(store: Store, selection: Selection, on_hold: bool, dry_run: bool, by: Any, note: str) -> Swept:
    left = {"live": 0, "on_hold": 0, "busy": 0}
    erased: list[Snapshot] = []
    for record in filter(selection.matches, store.records()):
        if record.status in LIVE:
            left["live"] += 1
        elif record.on_hold and not on_hold:
            left["on_hold"] += 1
        elif dry_run or store.delete(record):
            erased.append(record)
        else:
            left["busy"] += 1
    if not dry_run:
        history.redact([record.id for record in erased])
        for record in erased:
            if record.on_hold:
                history.write_erasure(record.id, record.now, by, note)
    return Swept(done={"erased": len(erased)}, left=left)


# --- Export ----------------------------------------------------------------------------------------------------------


def export(
    scope: str | None = None,
    *,
    bodies: bool = False,
    batch: int | None = None,
    using: str | None = None,
    store: Store | None = None,
    by: Any = None,
    note: str = "",
    **selected: Any,
) -> Iterator[dict[str, Any]]:
    """Yield what is stored about the records of ``scope``, or of another ``Selection``, each as a dict for JSON.

    - ``bodies``: include the headers and bodies of responses, decrypted. For each body, ``response_viewed`` is sent,
      and what the user ``by`` did, and the ``note`` on why, is written to the history.
    - ``batch``: records of any scope that are read in one statement; default: 1,000.
    - ``using``: the database's alias. ``store``: a store outside the database, of which all records are read.

    A body in UTF-8 is text in ``response["body"]``; any other body is in base64 in ``response["body_base64"]``. A body
    that is not stored, or can't be decrypted, is ``None``. The fingerprint is left out. Raises ``ValueError`` as
    ``Selection`` does, if ``batch`` is less than 1, and if ``DECISIONS`` requires a note for ``bodies``.
    """
    selection = Selection(scope, **selected)
    if bodies and history.lacks_note(note):
        raise ValueError("DECISIONS requires a note that says why.")
    if store is not None:
        for snapshot in filter(selection.matches, store.records()):
            yield _exported(record_of(snapshot), bodies, by, note)
        return

    def pick(rows: Records) -> list[tuple[UUID, Any]]:
        mine: Any = selection.of(rows)
        if bodies:  # they are read one by one, because they may be large
            return [(id, None) for id in mine.values_list("pk", flat=True)]
        return [(record.pk, record) for record in _whole(mine).defer("response_body", "response_headers")]

    pages = Pages(lambda: selection.near(records(using)), pick)
    for page, _swept in sweep(pages, None, {"batch": batch}, batch=EXPORTED, pause=0):
        for id, read in page.found:
            if record := read or _whole(records(using)).filter(pk=id).first():
                yield _exported(record, bodies, by, note)


def _whole(rows: Any) -> Any:
    return rows.annotate(has_body=HAS_BODY, now=DatabaseNow())


def _exported(record: Any, bodies: bool, by: Any, note: str) -> dict[str, Any]:
    content = _content(record, by, note) if bodies else {}
    columns = {name: getattr(record, name) for name in COLUMNS}
    times = {name: columns[name] and columns[name].isoformat() for name in TIMES}
    response = {"status": record.response_status, "has_body": record.has_body, **content}
    return {
        "id": str(record.pk),
        **columns,
        **times,
        "response": response if record.response_status else None,
    }


def _content(record: Any, by: Any, note: str) -> dict[str, Any]:
    response = stored_response(record)
    if response is None:
        return {}
    if record.response_body is not None:
        send(signals.response_viewed, operation_of(record), user=by)
        history.write_entry(record, by, f"{history.VIEWED} {note}".strip())
    headers = [list(header) for header in response.headers]
    if response.body is None:
        return {"headers": headers, "body": None}
    try:
        return {"headers": headers, "body": response.body.decode()}
    except UnicodeDecodeError:
        return {"headers": headers, "body": None, "body_base64": base64.b64encode(response.body).decode()}
