"""Records in a database, with a cache of their responses in front.

A record that is done is served from the cache, without a statement, if the request is
the same. The database decides about a request that differs in scope, key or
fingerprint, about a record that is not done, and about everything while the cache can't
be read. The cache is never trusted for longer than ``max_age`` seconds, by its own
clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.db import connections, transaction

from django_idempotency import Policy
from django_idempotency.extending import cause, is_due, log, option, seconds, text
from django_idempotency.extending.stores import (
    TERMINAL,
    CacheGuard,
    Claimed,
    DatabaseOptions,
    DatabaseStore,
    Operation,
    Receipt,
    Seen,
    Snapshot,
    Status,
    Store,
    StoredResponse,
    as_recorded,
    database_store,
    is_encrypted,
)

T = TypeVar("T")

VERSION = 1  # of entries: others are as good as none
PREFIX = "idempotency:"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_BODY = 64 * 1024  # bytes; responses with a longer body are not cached
# seconds: a cache that takes longer to respond, or fails, is not used for the pause
PATIENCE, PAUSE = 0.25, 5.0
# in place of an entry: there is none, and a record that was read earlier does not
# replace it
FORGOTTEN = b""


@dataclass(frozen=True, kw_only=True)
class CacheOptions(DatabaseOptions):
    """The ``OPTIONS`` of a cached store. Times are in seconds.

    ``cache``: alias in ``CACHES``. ``max_age``: how long an entry is trusted after it
    was written.
    """

    cache: str = option("default", text("an alias in CACHES"))
    max_age: float = option(30.0, seconds(1, 24 * 60 * 60))

    @property
    def longest(self) -> float:
        """Seconds for which a response may be replayed after the record changed without
        the cache knowing.

        An entry may be as old as ``max_age`` when it is written, and is trusted for as
        long again.
        """
        return 2 * self.max_age


_guards: dict[str, CacheGuard] = {}
# by alias: where the first claim of this process looked for the table
_first_schemas: dict[str, tuple[str, ...]] = {}
_several_schemas: set[str] = set()


class CachedStore(DatabaseStore):
    """A database's store, chosen by the database's vendor, with a cache in front. Name
    this class in ``STORES``.
    """

    options: CacheOptions

    @classmethod
    def configure(cls, **options: Any) -> CacheOptions:
        return CacheOptions(**options)

    @classmethod
    def bind(
        cls, policy: Policy, operation: Operation | None, alias: str, options: Any
    ) -> Store:
        plain = database_store(policy, operation, options)
        return _behind_a_cache(type(plain))(policy, plain.name, options)

    @classmethod
    def forget(cls, ids: Collection[UUID], using: str, options: CacheOptions) -> float:
        """Mark the records for as long as a response that was read before could be
        written to the cache.

        The seconds are 0 unless the cache can't be reached, or each process has its
        own.
        """
        marks = {_key(id, using): FORGOTTEN for id in ids}
        try:
            cache = caches[options.cache]
            missed = cache.set_many(marks, math.ceil(options.longest)) if marks else []
        except Exception as error:  # a cache may raise anything
            log(
                logging.WARNING,
                "cache_error",
                "idempotency: the cache %r failed: %s",
                options.cache,
                cause(error),
            )
            return options.longest
        return options.longest if missed or isinstance(cache, LocMemCache) else 0.0

    def claim(self, operation: Operation, token: UUID) -> Any:
        if found := self._cached(operation):
            schema = _tenant(self.name)
            return Seen(found, receipt=Receipt((schema,)) if schema else None)
        begun = time.monotonic()
        seen = super().claim(operation, token)
        if isinstance(seen, Claimed | Seen):
            self._note(getattr(seen.receipt, "schemas", ()))
        if isinstance(seen, Seen) and time.monotonic() - begun < self.options.max_age:
            self._keep_record(seen.record)
        return seen

    def lookup(self, operation: Operation) -> Snapshot | None:
        return self._cached(operation) or super().lookup(operation)

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        written = super().complete(claim, response, failure=failure)
        if written:
            begun, status = (
                time.monotonic(),
                Status.FAILED if failure else Status.COMPLETED,
            )
            created_at = self.created_at(claim)
            if created_at is None and is_encrypted(response):
                # it can't be decrypted without the time: a replay will cache it
                return written

            def keep() -> None:
                if time.monotonic() - begun < self.options.max_age:
                    self._keep(
                        claim.operation,
                        status,
                        response,
                        self.policy.retention,
                        created_at,
                        newest=True,
                    )

            transaction.on_commit(keep, using=self.name, robust=True)
        return written

    def delete(self, record: Snapshot) -> bool:
        deleted = super().delete(record)
        if deleted:
            self.forget([record.id], self.name, self.options)
        return deleted

    # --- tenants with a schema each

    def _note(self, schemas: tuple[str, ...]) -> None:
        """Stop using the cache if tenants have a schema each that only the server
        knows: entries would mix.
        """
        if (
            not schemas
            or _tenant(self.name) is not None
            or self.name in _several_schemas
        ):
            return
        first = _first_schemas.setdefault(self.name, schemas)
        if schemas != first:
            _several_schemas.add(self.name)
            message = (
                "idempotency: the database %r has several schemas (%s; %s), so no cache"
                " is used in front of it"
            )
            log(
                logging.WARNING,
                "cache_error",
                message,
                self.name,
                ", ".join(first),
                ", ".join(schemas),
            )

    # --- the cache

    def _ask_cache(self, what: Callable[[Any], T]) -> T | None:
        options = self.options
        if self.name in _several_schemas:
            return None
        guard = _guards.setdefault(options.cache, CacheGuard())
        return guard.ask(what, options.cache, patience=PATIENCE, pause=PAUSE)

    def _cached(self, operation: Operation) -> Snapshot | None:
        entry = self._ask_cache(lambda cache: cache.get(_key(operation.id, self.name)))
        if not isinstance(entry, tuple) or entry[:1] != (VERSION,):
            return None
        if _is_damaged(entry):
            message = "idempotency record %s: its entry in the cache %r is damaged"
            if is_due(message):
                cache = self.options.cache
                log(
                    logging.WARNING,
                    "cache_error",
                    message,
                    operation.id,
                    cache,
                    operation=operation,
                )
            return None
        return _record(entry, operation)

    def _keep_record(self, record: Snapshot) -> None:
        if record.response is None or record.status not in TERMINAL:
            return
        operation = Operation(record.scope, record.key, record.fingerprint)
        left = (record.expires_at - record.now).total_seconds()
        self._keep(
            operation, Status(record.status), record.response, left, record.created_at
        )

    def _keep(
        self,
        operation: Operation,
        status: Status,
        response: StoredResponse,
        left: float,
        created_at: datetime | None = None,
        *,
        newest: bool = False,
    ) -> None:
        """Write an entry. A response that was read replaces none, as it may be
        outdated; one just committed does.

        It does not if it is gone again: the project's hooks run between COMMIT and
        here, and so may an erasure.
        """
        if left < 1 or len(response.body or b"") > MAX_BODY:
            return
        entry = (
            _key(operation.id, self.name),
            _entry(operation, status, response, created_at or EPOCH),
        )
        seconds = int(min(left, self.options.max_age))
        added = self._ask_cache(lambda cache: cache.add(*entry, seconds))
        if newest and added is False:
            record = self.read(operation.id)
            if record is not None and record.response == response:
                self._ask_cache(lambda cache: cache.set(*entry, seconds))


@lru_cache
def _behind_a_cache(plain: type[DatabaseStore]) -> type[DatabaseStore]:
    return type(f"Cached{plain.__name__}", (CachedStore, plain), {})


# --- Entries --------------------------------------------------------------------------


def _key(id: UUID, using: str) -> str:
    schema = _tenant(using)
    return f"{PREFIX}{using}:{id.hex}" + (f":{quote(schema)}" if schema else "")


def _entry(
    operation: Operation, status: Status, response: StoredResponse, created_at: datetime
) -> tuple[Any, ...]:
    request = (operation.scope, operation.key, operation.fingerprint)
    return (
        VERSION,
        *request,
        created_at,
        status.value,
        response.status,
        response.headers,
        response.body,
    )


KINDS: tuple[Any, ...] = (int, str, str, bytes, datetime, str, int, tuple)
KINDS += (bytes | None,)


def _is_damaged(entry: tuple[Any, ...]) -> bool:
    if len(entry) != len(KINDS) or not all(map(isinstance, entry, KINDS)):
        return True
    _created_at, status, *response = entry[4:]
    whole = StoredResponse.of(*response).headers == response[1]
    return not (whole and status in TERMINAL and 100 <= response[0] < 600)


def _record(entry: tuple[Any, ...], operation: Operation) -> Snapshot | None:
    """Return an entry as a record; ``None`` unless it is of the same request."""
    (
        _version,
        scope,
        key,
        fingerprint,
        created_at,
        status,
        response_status,
        headers,
        body,
    ) = entry
    if (scope, key) != (operation.scope, operation.key):
        return None
    same = as_recorded(operation, fingerprint)
    if same is None or same.fingerprint != fingerprint:
        return None
    return Snapshot(
        id=operation.id,
        scope=scope,
        key=key,
        fingerprint=fingerprint,
        mode="atomic",
        hold_on_crash=False,
        created_at=created_at,
        status=status,
        attempts=1,
        on_hold=False,
        reason="",
        token=None,
        locked_at=None,
        locked_until=None,
        expires_at=EPOCH + timedelta(days=1),  # the entry itself expires in time
        response_status=response_status,
        response_headers=headers,
        response_body=body,
        now=EPOCH,
    )


def _tenant(using: str) -> str | None:
    """Return the schema that is set for the connection ``using``, as by django-tenants;
    ``None`` if it has no such.
    """
    schema: str | None = getattr(connections[using], "schema_name", None)
    return schema
