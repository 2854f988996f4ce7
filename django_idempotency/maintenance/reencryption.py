"""Encrypt stored responses again with the newest key, so that an old key can be removed before they expire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import conf
from django_idempotency.digests import key_id_of
from django_idempotency.maintenance.batches import LONGEST, in_transaction, sum_of
from django_idempotency.maintenance.records import HAS_BODY, Page, Records, lockable, locked, pages, records
from django_idempotency.models import TERMINAL, IdempotencyRecord
from django_idempotency.outcomes import StoredResponse
from django_idempotency.stats.queries import at_most
from django_idempotency.stores.codec import encrypted, encryption_key_of, is_encrypted, key_id, life_of, stored_response

PAGE = 500
IN_CLEAR = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencrypted:
    """The result of encrypting again.

    ``reencrypted``: responses that have the newest key now. Two kinds were left alone: ``unreadable`` ones, and
    ``busy`` ones, which another transaction had locked. ``keys``, ``digest_keys``: how many responses and fingerprints
    had each key before, by its id; an empty id stands for no key. ``after``: the id of the last record that was looked
    at. ``finished``: the whole table was looked through.
    """

    reencrypted: int = 0
    unreadable: int = 0
    busy: int = 0
    keys: Mapping[str, int] = field(default_factory=dict)
    digest_keys: Mapping[str, int] = field(default_factory=dict)
    after: UUID | None = None
    finished: bool = True

    @property
    def complete(self) -> bool:
        """Whether nothing is left of what was to be encrypted."""
        return self.finished and not (self.unreadable or self.busy)

    def __add__(self, later: Reencrypted) -> Reencrypted:
        return Reencrypted(
            reencrypted=self.reencrypted + later.reencrypted,
            unreadable=self.unreadable + later.unreadable,
            busy=self.busy + later.busy,
            keys=dict(Counter(self.keys) + Counter(later.keys)),
            digest_keys=dict(Counter(self.digest_keys) + Counter(later.digest_keys)),
            after=later.after or self.after,
            finished=later.finished,
        )


def reencrypt(**options: Any) -> Reencrypted:
    """Encrypt stored responses again with the newest of ``ENCRYPTION_KEYS``. Those that have it are left alone.

    The options and errors are those of ``reencrypt_in_batches``.
    """
    return sum_of(reencrypt_in_batches(**options))


def reencrypt_in_batches(
    *,
    unencrypted: bool = False,
    dry_run: bool = False,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    after: UUID | None = None,
    using: str | None = None,
) -> Iterator[Reencrypted]:
    """Do the same as ``reencrypt``, batch by batch, as the iterator is asked for them.

    - ``unencrypted``: encrypt responses that are stored in clear, too. It is not known whether they are what a view
      returned.
    - ``dry_run``: only count.
    - ``batch``: records that are looked at in one transaction; default: 500.
    - ``pause``: seconds between two batches; default: ``CLEANUP_PAUSE``.
    - ``max_seconds``: begin no further batch after that.
    - ``after``: continue after the record with this id, at which an earlier run ended.
    - ``using``: the database's alias.

    Raises ``ImproperlyConfigured`` if there is no key, and ``ValueError`` if ``batch`` is less than 1.
    """
    if not conf().encryption:
        raise ImproperlyConfigured("There is no key in ENCRYPTION_KEYS.")
    batch = PAGE if batch is None else batch
    for page in pages(using, batch=batch, pause=pause, max_seconds=max_seconds, after=after):
        yield _reencrypt(page, unencrypted=unencrypted, dry_run=dry_run)


def _reencrypt(page: Page, *, unencrypted: bool, dry_run: bool) -> Reencrypted:
    done = page.rows.filter(status__in=TERMINAL)
    fingerprints = page.rows.values_list("fingerprint", flat=True)
    with_response = done.filter(response_status__isnull=False).annotate(has_body=HAS_BODY)
    stored = with_response.values_list("pk", "response_headers", "has_body")
    with at_most(LONGEST, done.db):
        keys = {id: key for id, *content in stored if (key := encryption_key_of(*content)) is not None}
        found = Reencrypted(
            keys=dict(Counter(keys.values())),
            digest_keys=dict(
                Counter(key_id_of(bytes(fingerprint)).hex() for fingerprint in fingerprints if fingerprint)
            ),
            after=page.after,
            finished=page.last,
        )
    newest = key_id(conf().encryption[0])
    wanted = {id for id, key in keys.items() if key != newest and (unencrypted or key != IN_CLEAR)}
    if dry_run or not wanted:
        return found

    def run(rows: Records) -> list[bool]:
        ids = list(locked(rows).values_list("pk", flat=True))
        return [_reencrypt_one(records(done.db).filter(pk=id)) for id in ids]

    parts = lockable(done.filter(pk__in=wanted), wanted)
    written = [one for part in parts for one in in_transaction(done.db, partial(run, part))]
    unreadable = written.count(False)
    return replace(
        found,
        reencrypted=len(written) - unreadable,
        unreadable=unreadable,
        busy=len(wanted) - len(written),
    )


def _padded_to(record: IdempotencyRecord) -> int:
    """Return the length in bytes of what is encrypted, with the padding that a view's policy may have asked for."""
    from django_idempotency.stores.encryption import OVERHEAD

    if not is_encrypted(StoredResponse.of(0, record.response_headers, None)):
        return 0
    return max(0, len(record.response_body or b"") - OVERHEAD)


def _reencrypt_one(row: Records) -> bool:
    """Encrypt the response of a record whose row is locked. Return false if it can't be read or encrypted."""
    record = row.get()
    response = stored_response(record)
    if response is None or not response.has_content:
        return False
    again = encrypted(response, life_of(record), conf().policy.encrypt_padding, least=_padded_to(record))
    if again is None:
        return False
    row.update(response_headers=again.headers, response_body=again.body)
    return True
