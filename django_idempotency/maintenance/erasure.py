"""Erase records, for example those of a user who asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

from django_idempotency.maintenance import log_entries
from django_idempotency.maintenance.batches import LONGEST, in_transaction, sum_of
from django_idempotency.maintenance.cleaner import Change, delete_rows
from django_idempotency.maintenance.records import Records, lockable, locked, pages, records
from django_idempotency.maintenance.selection import Selection
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow
from django_idempotency.stats.queries import at_most
from django_idempotency.stores import cached

PAGE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The result of erasing records.

    ``erased``: records that were deleted or emptied. Three kinds were left alone: ``live`` (started or processing),
    ``on_hold``, and ``busy`` (locked at that moment). ``after``: the id of the last record that was looked at.
    ``finished``: the whole table was looked through. ``cached_for``: for how many seconds a cache in front of the
    database may still replay what was erased, because it could not be reached or is in the memory of each process.
    """

    erased: int = 0
    live: int = 0
    on_hold: int = 0
    busy: int = 0
    after: UUID | None = None
    finished: bool = True
    cached_for: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing is left of what was to be erased."""
        return self.finished and not (self.live or self.on_hold or self.busy or self.cached_for)

    def __add__(self, later: Erased) -> Erased:
        return Erased(
            erased=self.erased + later.erased,
            live=self.live + later.live,
            on_hold=self.on_hold + later.on_hold,
            busy=self.busy + later.busy,
            after=later.after or self.after,
            finished=later.finished,
            cached_for=max(self.cached_for, later.cached_for),
        )


def erase(scope: str | None = None, **options: Any) -> Erased:
    """Erase the records of ``scope``, or of another ``Selection``. A retry with an erased key runs again, as new.

    The options and errors are those of ``erase_in_batches``.
    """
    return sum_of(erase_in_batches(scope, **options))


def erase_in_batches(
    scope: str | None = None,
    *,
    bodies: bool = False,
    on_hold: bool = False,
    dry_run: bool = False,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    after: UUID | None = None,
    using: str | None = None,
    **selected: Any,
) -> Iterator[Erased]:
    """Do the same as ``erase``, batch by batch, as the iterator is asked for them.

    Scopes and paths have no index, so for those the table is walked in the order of the ids. Records that are started
    or processing are left alone, and counted. Keys that are created meanwhile may be missed. A cache in front of the
    database no longer replays erased records, either. The texts of the admin's log about erased records are replaced,
    including those about records that are gone already.

    - ``scope_prefix``, ``key``, ``record``, ``path``: as for ``Selection``; a record must match all that are set.
    - ``bodies``: erase the headers and bodies of the responses, the paths, the reasons, the fingerprints and the
      traces, but keep the keys: a retry is told that its operation is done.
    - ``on_hold``: erase records on hold, too.
    - ``dry_run``: only count.
    - ``batch``: records of any scope that are looked at in one transaction; default: 10,000.
    - ``pause``: seconds between two batches; default: ``CLEANUP_PAUSE``.
    - ``max_seconds``: begin no further batch after that.
    - ``after``: continue after the record with this id, at which an earlier run ended.
    - ``using``: the database's alias.

    Raises ``ValueError`` as ``Selection`` does, and if ``batch`` is less than 1.
    """
    selection = Selection(scope, **selected)
    change: Change = (lambda rows: None) if dry_run else _empty if bodies else delete_rows
    batch = PAGE if batch is None else batch
    walk = pages(using, batch=batch, pause=pause, max_seconds=max_seconds, after=after, near=selection.near)
    for page in walk:
        erased = _erase(selection.of(page.rows), change, on_hold=on_hold, dry_run=dry_run)
        if page.last and not dry_run:
            log_entries.redact_gone(selection)
        yield replace(erased, after=page.after, finished=page.last)


def _erase(mine: Records, change: Change, *, on_hold: bool, dry_run: bool) -> Erased:
    with at_most(LONGEST, mine.db):
        found = list(mine.values_list("pk", "status", "on_hold"))
    if not found:
        return Erased()
    ended = mine.filter(status__in=TERMINAL) if on_hold else mine.filter(status__in=TERMINAL, on_hold=False)

    def run(rows: Records) -> set[UUID]:
        ids = list(locked(rows).values_list("pk", flat=True))
        change(records(mine.db).filter(pk__in=ids))
        if not dry_run:
            log_entries.redact(ids)
        return set(ids)

    parts = lockable(ended, (id for id, _status, _on_hold in found))
    erased = set().union(*(in_transaction(mine.db, partial(run, part)) for part in parts))
    cached_for = cached.forget(erased, mine.db) if erased and not dry_run else 0.0
    left = [(status in LIVE, is_on_hold) for id, status, is_on_hold in found if id not in erased]
    live = sum(is_live for is_live, _on_hold in left)
    waiting = 0 if on_hold else sum(is_on_hold for _live, is_on_hold in left)
    busy = len(left) - live - waiting
    return Erased(erased=len(erased), live=live, on_hold=waiting, busy=busy, cached_for=cached_for)


def _empty(rows: Records) -> object:
    done = rows.filter(response_status__isnull=False)
    done.update(response_headers=[], response_body=None, updated_at=DatabaseNow())
    # Leave updated_at alone: if there is no response yet, it tells how long one will be kept.
    return rows.update(path="", reason="", fingerprint=b"", trace=None)
