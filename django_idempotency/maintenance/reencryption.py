"""Encrypt stored responses again with the newest key, so that an old key can be removed before they expire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import conf
from django_idempotency.engine.digests import key_id_of
from django_idempotency.maintenance.records import HAS_BODY, Records, records
from django_idempotency.maintenance.sweep import Batch, Bounds, Pages, Swept, stepwise, sweep
from django_idempotency.models import TERMINAL
from django_idempotency.stores.codec import encrypted, encryption_key_of, key_id, life_of, stored_response

PAGE = 500
IN_CLEAR = ""


# The ids of the keys of a response and of a fingerprint; ``None`` without one.
Keys = tuple[str | None, str | None]


@stepwise
def reencrypt(*, unencrypted: bool = False, after: UUID | None = None, **bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Encrypt stored responses again with the newest of ``ENCRYPTION_KEYS``. Those that have it are left alone.

    ``found`` of the result counts how many responses and fingerprints had each key before, as ``key <id>`` and
    ``digest key <id>``; the id is ``none`` without one. Responses that can't be read, and locked ones, are left alone.

    - ``unencrypted``: encrypt responses that are stored in clear, too. It is not known whether they are what a view
      returned.
    - ``after``: continue after the record with this id, at which an earlier run ended.

    The other arguments are those of ``Bounds``; the default of ``batch`` is 500. Raises ``ImproperlyConfigured`` if
    there is no key.
    """
    if not conf().encryption:
        raise ImproperlyConfigured("There is no key in ENCRYPTION_KEYS.")
    newest = key_id(conf().encryption[0])
    dry_run = bounds.get("dry_run", False)

    def wanted(found: list[tuple[UUID, Keys]]) -> list[UUID]:
        old = [(id, key) for id, (key, _digest_key) in found if key not in (None, newest)]
        return [id for id, key in old if unencrypted or key != IN_CLEAR]

    pages = Pages(lambda: records(bounds.get("using")), _keys_of, wanted, after)
    for one, swept in sweep(pages, _reencrypt, bounds, batch=PAGE):
        old = wanted(list(one.found))
        busy = 0 if dry_run else len(old) - one.picked
        yield replace(
            swept,
            done={"reencrypted": len(old) if dry_run else sum(one.changed)},
            left={"unreadable": one.changed.count(False), "busy": busy},
            found=_counted([keys for _id, keys in one.found]),
        )


def _counted(found: list[Keys]) -> dict[str, int]:
    responses = (f"key {key or 'none'}" for key, _digest_key in found if key is not None)
    fingerprints = (f"digest key {key or 'none'}" for _key, key in found if key is not None)
    return dict(Counter([*responses, *fingerprints]))


def _keys_of(rows: Records) -> list[tuple[UUID, Keys]]:
    columns = ("pk", "status", "response_status", "response_headers", "has_body", "fingerprint")
    found: list[tuple[UUID, Keys]] = []
    for id, status, code, headers, has_body, digest in rows.annotate(has_body=HAS_BODY).values_list(*columns):
        key = encryption_key_of(headers, has_body) if status in TERMINAL and code is not None else None
        found.append((id, (key, key_id_of(bytes(digest)).hex() if digest else None)))
    return found


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
