"""Encrypt stored responses again with the newest key, so that an old key can be removed before they expire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import conf
from django_idempotency.maintenance.records import HAS_BODY, Records, records
from django_idempotency.maintenance.sweep import Batch, Bounds, Pages, Swept, stepwise, sweep
from django_idempotency.models import TERMINAL
from django_idempotency.stores.codec import encrypted, encryption_key_of, key_id, life_of, stored_response

PAGE = 500


@stepwise
def reencrypt(*, after: UUID | None = None, **bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Encrypt stored responses again with the newest of ``ENCRYPTION_KEYS``. Those that have it are left alone.

    Responses that are stored in clear, that can't be read, or that are locked are left alone, too.

    ``after``: continue after the record with this id, at which an earlier run ended. The other arguments are those of
    ``Bounds``; the default of ``batch`` is 500. Raises ``ImproperlyConfigured`` if there is no key.
    """
    if not conf().encryption:
        raise ImproperlyConfigured("There is no key in ENCRYPTION_KEYS.")
    newest = key_id(conf().encryption[0])
    dry_run = bounds.get("dry_run", False)

    def under_an_old_key(rows: Records) -> list[tuple[UUID, None]]:
        ended = rows.filter(status__in=TERMINAL, response_status__isnull=False).annotate(has_body=HAS_BODY)
        columns = ended.values_list("pk", "response_headers", "has_body")
        keys = ((id, encryption_key_of(headers, has_body)) for id, headers, has_body in columns)
        return [(id, None) for id, key in keys if key not in (None, "", newest)]  # empty: in clear

    pages = Pages(lambda: records(bounds.get("using")), under_an_old_key, after=after)
    for one, swept in sweep(pages, _reencrypt, bounds, batch=PAGE):
        old = one.found
        busy = 0 if dry_run else len(old) - one.picked
        yield replace(
            swept,
            done={"reencrypted": len(old) if dry_run else sum(one.changed)},
            left={"unreadable": one.changed.count(False), "busy": busy},
        )


def _reencrypt(rows: Records) -> Batch:
    ids = list(rows.filter(status__in=TERMINAL).values_list("pk", flat=True))
    return Batch(changed=[_reencrypt_one(records(rows.db).filter(pk=id)) for id in ids], picked=len(ids))


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
