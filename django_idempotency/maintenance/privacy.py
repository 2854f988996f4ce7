"""Erase or export records, for example those of a user who asks for it; encrypt stored responses with a new key."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, Unpack
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Value
from django.db.models.functions import Substr

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.maintenance import history
from django_idempotency.maintenance.cleaner import delete_rows
from django_idempotency.maintenance.records import (
    HAS_BODY,
    Records,
    operation_of,
    record_of,
    records,
)
from django_idempotency.maintenance.sweep import (
    Batch,
    Bounds,
    Pages,
    Swept,
    batch_size,
    sweep,
)
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store, forget
from django_idempotency.stores.codec import (
    encrypted,
    encryption_key_of,
    key_id,
    life_of,
    stored_response,
)
from django_idempotency.values.outcomes import Snapshot

EXAMINED, EXPORTED = 10_000, 1_000  # records that are read in one statement
TIMES = (
    "created_at",
    "updated_at",
    "locked_at",
    "locked_until",
    "expires_at",
    "purge_at",
    "last_replayed_at",
)
COLUMNS = (
    "scope",
    "key",
    "method",
    "path",
    "mode",
    "status",
    "on_hold",
    "reason",
    "attempts",
    "replays",
    *TIMES,
)


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
        stated = [value for value in astuple(self) if value is not None]
        if not stated or "" in stated:
            raise ValueError(
                "Pass scope, scope_prefix, key or record to select records; none may be empty."
            )
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
        return rows if self.record is None else rows.with_id(self.record)

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
) -> Swept:
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
    selection, dry_run = (
        Selection(scope, scope_prefix, key, record),
        bounds.get("dry_run", False),
    )
    erasable = {"ended", "on_hold"} if on_hold else {"ended"}
    if on_hold and not bodies:
        _refuse_undecided(note)
    if store is not None:
        if bodies:
            raise ValueError(f"The store {store.name!r} erases only whole records.")
        return _erase_in_store(store, selection, erasable, dry_run, by, note)

    def pick(rows: Records) -> tuple[list[UUID], Counter[str]]:
        columns = selection.of(rows).values_list("pk", "status", "on_hold")
        kinds = [(id, _kind(status, held)) for id, status, held in columns]
        return (
            [id for id, kind in kinds if kind in erasable],
            Counter(kind for _id, kind in kinds if kind not in erasable),
        )

    def change(rows: Records) -> Batch:
        ended = selection.of(rows).filter(status__in=TERMINAL)
        ended = ended if on_hold else ended.filter(on_hold=False)
        found = list(ended.only("on_hold").annotate(now=DatabaseNow()))
        ids = [record.pk for record in found]
        (_empty if bodies else delete_rows)(records(rows.db).filter(pk__in=ids))
        history.redact(ids)
        if not bodies:
            _write_erasures(found, by, note)
        return Batch(changed=ids, picked=len(ids))

    def result(page: Batch) -> Swept:
        erased = page.wanted if dry_run else page.changed
        cached_for = forget(erased, rows.db) if erased and not dry_run else 0.0
        busy = len(page.wanted) - len(erased) - len(page.bad)
        done = {"emptied" if bodies else "erased": len(erased)}
        return Swept(done=done, left=_left(page.others, busy), cached_for=cached_for)

    rows = selection.near(records(bounds.get("using")))
    return sweep(Pages(rows, pick, after), change, bounds, result, batch=EXAMINED)


def _refuse_undecided(note: str) -> None:
    if history.lacks_note(note):
        raise ValueError("DECISIONS requires a note that says why.")
    if "second_operator" in conf().decisions:
        raise ValueError(
            "DECISIONS requires two operators: have them decide about the keys on hold, then erase these."
        )


def _kind(status: str, on_hold: bool) -> str:
    return "live" if status in LIVE else "on_hold" if on_hold else "ended"


def _left(others: Counter[str], busy: int) -> dict[str, int]:
    return {"live": others["live"], "on_hold": others["on_hold"], "busy": busy}


def _empty(rows: Records) -> object:
    done = rows.filter(response_status__isnull=False)
    done.update(response_headers=[], response_body=None, updated_at=DatabaseNow())
    # Leave updated_at alone: if there is no response yet, it tells how long one will be kept.
    return rows.update(path="", reason="", fingerprint=b"")


def _erase_in_store(
    store: Store,
    selection: Selection,
    erasable: set[str],
    dry_run: bool,
    by: Any,
    note: str,
) -> Swept:
    others, busy, erased = Counter[str](), 0, list[Snapshot]()
    for record in filter(selection.matches, store.records()):
        kind = _kind(record.status, record.on_hold)
        if kind not in erasable:
            others[kind] += 1
        elif dry_run or store.delete(record):
            erased.append(record)
        else:
            busy += 1
    if not dry_run:
        history.redact([record.id for record in erased])
        _write_erasures(map(record_of, erased), by, note)
    return Swept(done={"erased": len(erased)}, left=_left(others, busy))


def _write_erasures(erased: Iterable[Any], by: Any, note: str) -> None:
    for record in erased:
        if record.on_hold:
            history.write_entry(record, by, f"Erased while on hold. {note}".strip())


# --- Export ----------------------------------------------------------------------------------------------------------


def export(
    scope: str | None = None,
    *,
    bodies: bool = False,
    batch: int = EXPORTED,
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

    def pick(rows: Records) -> tuple[list[UUID], list[Any]]:
        mine = selection.of(rows)
        if bodies:  # they are read one by one, because they may be large
            return list(mine.values_list("pk", flat=True)), []
        return [], list(_whole(mine).defer("response_body", "response_headers"))

    rows = selection.near(records(using))
    for page in Pages(rows, pick).batches(None, batch_size(batch, rows.db)):
        one_by_one = (_whole(rows).filter(pk=id).first() for id in page.wanted)
        for record in filter(None, chain(page.others, one_by_one)):
            yield _exported(record, bodies, by, note)


def _whole(rows: Any) -> Any:
    return rows.annotate(has_body=HAS_BODY, now=DatabaseNow())


def _exported(record: Any, bodies: bool, by: Any, note: str) -> dict[str, Any]:
    content = _content(record, by, note) if bodies else {}
    columns = {name: getattr(record, name) for name in COLUMNS}
    times = {name: columns[name] and columns[name].isoformat() for name in TIMES}
    response = {
        "status": record.response_status,
        "has_body": record.has_body,
        **content,
    }
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
    content = {"headers": [list(header) for header in response.headers], "body": None}
    if response.body is None:
        return content
    try:
        return content | {"body": response.body.decode()}
    except UnicodeDecodeError:
        return content | {"body_base64": base64.b64encode(response.body).decode()}


# --- Encryption with the newest key ----------------------------------------------------------------------------------

PAGE = 500


def reencrypt(*, after: UUID | None = None, **bounds: Unpack[Bounds]) -> Swept:
    """Encrypt stored responses again with the newest of ``ENCRYPTION_KEYS``. Those that have it are left alone.

    Responses that are stored in clear, that can't be read, or that are locked are left alone, too.

    ``after``: continue after the record with this id, at which an earlier run ended. The other arguments are those of
    ``Bounds``; the default of ``batch`` is 500. Raises ``ImproperlyConfigured`` if there is no key.
    """
    if not conf().encryption:
        raise ImproperlyConfigured("There is no key in ENCRYPTION_KEYS.")
    newest = key_id(conf().encryption[0])
    dry_run = bounds.get("dry_run", False)

    def under_an_old_key(rows: Records) -> tuple[list[UUID], None]:
        ended = rows.filter(
            status__in=TERMINAL, response_status__isnull=False
        ).annotate(has_body=HAS_BODY)
        columns = ended.values_list("pk", "response_headers", "has_body")
        keys = (
            (id, encryption_key_of(headers, has_body))
            for id, headers, has_body in columns
        )
        return [
            id for id, key in keys if key not in (None, "", newest)
        ], None  # empty: in clear

    def result(page: Batch) -> Swept:
        done = len(page.wanted) if dry_run else sum(page.changed)
        busy = 0 if dry_run else len(page.wanted) - page.picked
        return Swept(
            done={"reencrypted": done},
            left={"unreadable": page.changed.count(False), "busy": busy},
        )

    pages = Pages(records(bounds.get("using")), under_an_old_key, after=after)
    return sweep(pages, _reencrypt, bounds, result, batch=PAGE)


def _reencrypt(rows: Records) -> Batch:
    ids = list(rows.filter(status__in=TERMINAL).values_list("pk", flat=True))
    return Batch(
        changed=[_reencrypt_one(records(rows.db).filter(pk=id)) for id in ids],
        picked=len(ids),
    )


def _reencrypt_one(row: Records) -> bool:
    """Encrypt the response of a record whose row is locked. Return false if it can't be read or encrypted."""
    record = row.get()
    response = stored_response(record)
    if response is None or not response.has_content:
        return False
    again = encrypted(response, life_of(record))
    if again is None:
        return False
    row.update(response_headers=again.headers, response_body=again.body)
    return True
