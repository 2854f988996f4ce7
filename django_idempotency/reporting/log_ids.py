"""Ids of records as logs and traces show them. Pure, apart from the settings.

A record's id is a digest of scope and key, so a reader who can guess those recognises it. With a digest key, logs show
a permutation of the id under the newest key, which can be reversed only with that key: a Feistel network of four rounds
of HMAC-SHA256 (Luby and Rackoff, "How to construct pseudorandom permutations", 1988).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import conf
from django_idempotency.values.keys import is_record_id

ROUNDS = range(4)
HALF = 8  # bytes
HIDDEN = UUID(int=0)


def shown_id(id: UUID) -> UUID:
    """Return a record's id as logs show it: unchanged without a digest key, ``HIDDEN`` if the keys are unavailable."""
    try:
        keys = conf().digests
    except ImproperlyConfigured:
        return HIDDEN
    return next((_permuted(id, key, ROUNDS) for key in keys.values()), id)


def ids_behind(shown: UUID) -> list[UUID]:
    """Return the ids of records that ``shown`` may stand for: itself, and those that logs show so under any key."""
    hidden = [_restored(shown, key) for key in conf().digests.values()]
    return [id for id in (shown, *hidden) if is_record_id(id)]


def _permuted(id: UUID, key: bytes, rounds: Iterable[int]) -> UUID:
    left, right = id.bytes[:HALF], id.bytes[HALF:]
    for number in rounds:
        mixed = hmac.digest(key, b"record id" + bytes([number]) + right, "sha256")[:HALF]
        left, right = right, bytes(one ^ other for one, other in zip(left, mixed, strict=True))
    return UUID(bytes=right + left)


def _restored(id: UUID, key: bytes) -> UUID:
    return _permuted(id, key, reversed(ROUNDS))
