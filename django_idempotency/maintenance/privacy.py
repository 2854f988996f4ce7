"""Erase or export records, for example those of a user who asks for it; encrypt stored
responses with a new key.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from typing import Any, Unpack
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, Value
from django.db.models.functions import Substr
from django.db.models.lookups import Exact
from django.utils.translation import gettext_noop

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.maintenance import history
from django_idempotency.maintenance.cleaner import delete_rows
from django_idempotency.maintenance.companions import companions
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
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow, Status
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store, forget
from django_idempotency.stores.codec import (
    binding_of,
    encrypted,
    encryption_key_of,
    key_id,
    stored_response,
)
from django_idempotency.values.outcomes import Snapshot
from django_idempotency.values.scopes import PATH

DONE_IN_PART = gettext_noop("it is done in part, and its data was erased")
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

    - ``scope``: a whole scope, as it is stored; with every path in it.
    - ``scope_prefix``: the beginning of a scope, up to a separator, such as ``acme/``
      for a tenant.
    - ``key``: a whole key, as the client sent it, in any scope.
    - ``record``: the id of a record.

    Raises ``ValueError`` if nothing is set, if a text is empty, or if the prefix ends
    with a letter or a digit: ``acct:1`` would match ``acct:10``.
    """

    scope: str | None = None
    scope_prefix: str | None = None
    key: str | None = None
    record: UUID | None = None

    def __post_init__(self) -> None:
        stated = [value for value in astuple(self) if value is not None]
        if not stated or "" in stated:
            raise ValueError(
                "Pass scope, scope_prefix, key or record to select records; none may be"
                " empty."
            )
        if self.scope_prefix is not None and self.scope_prefix[-1].isalnum():
            raise ValueError(
                f"scope_prefix is {self.scope_prefix!r}, which may also begin other"
                f" scopes, such as {self.scope_prefix + '0'!r}. End it with a"
                " separator, such as '/', or pass the whole scope."
            )

    def matches(self, record: Snapshot) -> bool:
        """Return whether a record of a store outside the database is selected."""
        return (
            (
                self.scope in (None, record.scope)
                or record.scope.startswith(f"{self.scope}{PATH}")
            )
            and record.scope.startswith(self.scope_prefix or "")
            and self.key in (None, record.key)
            and self.record in (None, record.id)
        )

    def near(self, rows: Records) -> Records:
        """Narrow ``rows`` by their primary key, as far as the selection determines
        it.
        """
        if self.key is not None:
            rows = rows.with_key(self.key)
        return rows if self.record is None else rows.with_id(self.record)

    def of(self, rows: Records) -> Records:
        """Return those of ``rows`` that are selected. ``near`` must have narrowed
        them.
        """
        if self.scope is not None:
            at_paths = _beginning(self.scope + PATH)
            rows = rows.filter(Q(scope=self.scope) | at_paths)
        if self.scope_prefix is None:
            return rows
        return rows.filter(_beginning(self.scope_prefix))


def _beginning(prefix: str) -> Q:
    # Not LIKE, which ignores case on SQLite.
    return Q(Exact(Substr("scope", 1, len(prefix)), Value(prefix)))


# --- Erasure --------------------------------------------------------------------------


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
    """Erase the records of ``scope``, or of another ``Selection``. A retry with an
    erased key runs again, as new.

    Scopes have no index, so for those the table is walked in the order of the ids.
    Records that are started or processing, locked or on hold are left alone, and
    counted. Records that are done in part are emptied, put on hold, and counted with
    those. Keys that are created meanwhile may be missed. A cache in front of the
    database no longer replays erased records, either. The texts of the history about
    erased records are replaced.

    - ``bodies``: empty the responses, but keep the records, so that no retry runs
      again.
    - ``on_hold``: erase records on hold, too. Without ``bodies`` this is a decision:
      ``DECISIONS`` may require a note, or refuse it, because two operators have to
      decide about each key first.
    - ``after``: continue after the record with this id, at which an earlier run ended.
    - ``store``: a store outside the database, of which all records are read, in one
      batch. It erases only whole records.
    - ``by``, ``note``: who erases records on hold, a user or a name, and why, for the
      history.

    The other arguments are those of ``Bounds``; the default of ``batch`` is 10,000.
    Raises ``ValueError`` as ``Selection`` does, if ``DECISIONS`` refuses it, and if the
    store can't erase what is selected.
    """
    selection = Selection(scope, scope_prefix, key, record)
    dry_run = bounds.get("dry_run", False)
    erasure = _Erasure(selection, bodies, on_hold, dry_run, by, note)
    if on_hold and not bodies:
        _refuse_undecided(note)
    if store is not None:
        if bodies:
            raise ValueError(f"The store {store.name!r} erases only whole records.")
        return erasure.in_store(store)
    rows = selection.near(records(bounds.get("using")))
    pages = Pages(rows, erasure.pick, after)
    result = partial(erasure.result, rows.db)
    return sweep(pages, erasure.change, bounds, result, batch=EXAMINED)


@dataclass(frozen=True, slots=True)
class _Erasure:
    """What ``erase`` does; its arguments are those of that."""

    selection: Selection
    bodies: bool
    on_hold: bool
    dry_run: bool
    by: Any
    note: str

    def is_erasable(self, kind: str) -> bool:
        return kind == "ended" or (self.on_hold and kind == "on_hold")

    def pick(self, rows: Records) -> tuple[list[UUID], Counter[str]]:
        columns = ("pk", "status", "on_hold")
        found = list(self.selection.of(rows).values_list(*columns, named=True))
        kept = self.kept(found, rows.db) if self.dry_run else ()
        kinds = [
            (each.pk, _kind(each.status, each.on_hold or each.pk in kept))
            for each in found
        ]
        wanted = [id for id, kind in kinds if self.is_erasable(kind)]
        return wanted, Counter(k for _id, k in kinds if not self.is_erasable(k))

    def kept(self, found: Iterable[Any], using: str) -> set[UUID]:
        """Return those that are done in part, which a retry would do again."""
        ids = [record.pk for record in found if record.status == Status.FAILED]
        if self.bodies or self.on_hold or not ids:
            return set()
        return {id for each in companions for id in each.unfinished(ids, using)}

    def change(self, rows: Records) -> Batch:
        ended = self.selection.of(rows).filter(status__in=TERMINAL)
        ended = ended if self.on_hold else ended.filter(on_hold=False)
        found = list(ended.only("status", "on_hold").annotate(now=DatabaseNow()))
        if kept := self.kept(found, rows.db):
            _erase(kept, rows.db, bodies=True)
            held = {"on_hold": True, "reason": DONE_IN_PART}
            records(rows.db).filter(pk__in=kept).update(**held)
        erased = [record for record in found if record.pk not in kept]
        _erase([record.pk for record in erased], rows.db, bodies=self.bodies)
        if not self.bodies:
            _write_erasures(erased, self.by, self.note)
        changed = [(record.pk, record.pk in kept) for record in found]
        return Batch(changed=changed, picked=len(found))

    def result(self, using: str, page: Batch) -> Swept:
        changed, cached_for = page.changed, 0.0
        if self.dry_run:
            changed = [(id, False) for id in page.wanted]
        elif changed:
            cached_for = forget([id for id, _is_kept in changed], using)
        left = _left(page.others, len(page.wanted) - len(changed) - len(page.bad))
        erased = sum(not is_kept for _id, is_kept in changed)
        left["on_hold"] += len(changed) - erased
        done = {"emptied" if self.bodies else "erased": erased}
        return Swept(done=done, left=left, cached_for=cached_for)

    def in_store(self, store: Store) -> Swept:
        others, busy, erased = Counter[str](), 0, list[Snapshot]()
        for record in filter(self.selection.matches, store.records()):
            kind = _kind(record.status, record.on_hold)
            if not self.is_erasable(kind):
                others[kind] += 1
            elif self.dry_run or store.delete(record):
                erased.append(record)
            else:
                busy += 1
        if not self.dry_run:
            history.redact([record.id for record in erased])
            _write_erasures(map(record_of, erased), self.by, self.note)
        return Swept(done={"erased": len(erased)}, left=_left(others, busy))


def _erase(ids: Collection[UUID], using: str, *, bodies: bool) -> None:
    (_empty if bodies else delete_rows)(records(using).filter(pk__in=ids))
    for companion in companions:
        (companion.empty if bodies else companion.delete)(ids, using)
    history.redact(ids)


def _refuse_undecided(note: str) -> None:
    if history.lacks_note(note):
        raise ValueError("DECISIONS requires a note that says why.")
    if "second_operator" in conf().decisions:
        raise ValueError(
            "DECISIONS requires two operators: have them decide about the keys on hold,"
            " then erase these."
        )


def _kind(status: str, on_hold: bool) -> str:
    return "live" if status in LIVE else "on_hold" if on_hold else "ended"


def _left(others: Counter[str], busy: int) -> dict[str, int]:
    return {"live": others["live"], "on_hold": others["on_hold"], "busy": busy}


def _empty(rows: Records) -> object:
    done = rows.filter(response_status__isnull=False)
    done.update(response_headers=[], response_body=None, updated_at=DatabaseNow())
    # Leave updated_at alone: if there is no response yet, it tells how long one will be
    # kept.
    return rows.update(path="", reason="", fingerprint=b"")


def _write_erasures(erased: Iterable[Any], by: Any, note: str) -> None:
    for record in erased:
        if record.on_hold:
            history.write_entry(record, by, f"Erased while on hold. {note}".strip())


# --- Export ---------------------------------------------------------------------------


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
    """Yield what is stored about the records of ``scope``, or of another ``Selection``,
    each as a dict for JSON.

    - ``bodies``: include the headers and bodies of responses, decrypted. For each body,
      ``response_viewed`` is sent, and what the user ``by`` did, and the ``note`` on
      why, is written to the history.
    - ``batch``: records of any scope that are read in one statement; default: 1,000.
    - ``using``: the database's alias. ``store``: a store outside the database, of which
      all records are read.

    A body in UTF-8 is text in ``response["body"]``; any other body is in base64 in
    ``response["body_base64"]``. A body that is not stored, or can't be decrypted, is
    ``None``. The fingerprint is left out. Raises ``ValueError`` as ``Selection`` does,
    if ``batch`` is less than 1, and if ``DECISIONS`` requires a note for ``bodies``.
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
    exported = {
        "id": str(record.pk),
        **columns,
        **times,
        "response": response if record.response_status else None,
    }
    for companion in companions:
        exported |= companion.exported(record, bodies=bodies)
    return exported


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


# --- Encryption with the newest key ---------------------------------------------------

PAGE = 500


def reencrypt(*, after: UUID | None = None, **bounds: Unpack[Bounds]) -> Swept:
    """Encrypt stored responses again with the newest of ``ENCRYPTION_KEYS``. Those that
    have it are left alone.

    Responses that are stored in clear, that can't be read, or that are locked are left
    alone, too.

    ``after``: continue after the record with this id, at which an earlier run ended.
    The other arguments are those of ``Bounds``; the default of ``batch`` is 500. Raises
    ``ImproperlyConfigured`` if there is no key.
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
        # empty: in clear
        return [id for id, key in keys if key not in (None, "", newest)], None

    def result(page: Batch) -> Swept:
        done = len(page.wanted) if dry_run else sum(page.changed)
        busy = 0 if dry_run else len(page.wanted) - page.picked
        return Swept(
            done={"reencrypted": done},
            left={"unreadable": page.changed.count(False), "busy": busy},
        )

    pages = Pages(records(bounds.get("using")), under_an_old_key, after=after)
    for companion in () if dry_run else companions:
        companion.reencrypt(pages.rows.db)
    return sweep(pages, _reencrypt, bounds, result, batch=PAGE)


def _reencrypt(rows: Records) -> Batch:
    ids = list(rows.filter(status__in=TERMINAL).values_list("pk", flat=True))
    return Batch(
        changed=[_reencrypt_one(records(rows.db).filter(pk=id)) for id in ids],
        picked=len(ids),
    )


def _reencrypt_one(row: Records) -> bool:
    """Encrypt the response of a record whose row is locked. Return false if it can't be
    read or encrypted.
    """
    record = row.get()
    response = stored_response(record)
    if response is None or not response.has_content:
        return False
    again = encrypted(response, binding_of(record))
    if again is None:
        return False
    row.update(response_headers=again.headers, response_body=again.body)
    return True
