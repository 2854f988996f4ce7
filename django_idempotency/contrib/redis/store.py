"""Records in Redis, Redis Cluster or Valkey, for lease mode: one hash per record,
changed by scripts on the server.

What it promises depends on how Redis is run; ``docs/stores.md`` says what can be lost,
and when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import Any
from uuid import UUID

from django.utils.translation import gettext_noop

from django_idempotency import StoreUnavailable
from django_idempotency.contrib.redis import scripts
from django_idempotency.contrib.redis.client import (
    ID_LENGTH,
    Connection,
    RedisOptions,
    TooFew,
    connection,
)
from django_idempotency.extending import FOR_GOOD
from django_idempotency.extending.stores import (
    Claimed,
    Operation,
    Seen,
    Snapshot,
    Status,
    Store,
    StoreConflict,
    StoredResponse,
    StoreRefused,
    Unlocked,
    check_move,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FOREVER = 0
ABANDONED = 3600  # seconds that the record of a silent owner is kept after its lease
GROUPS = 256  # by the first byte of the id; each group is in one slot of a cluster
MOST_UNFINISHED = 100  # of a group that are shown
AT_ONCE = 500
TAKEOVER_NOT_ACKNOWLEDGED = gettext_noop("too few acknowledgements of a takeover")


class RedisStore(Store):
    """Each method that writes runs one script, which is fenced by the token and uses
    the server's clock.

    Lease mode only: no transaction can hold both a view's effects and its record in
    Redis.
    """

    options: RedisOptions

    @classmethod
    def configure(cls, **options: Any) -> RedisOptions:
        return RedisOptions(**options)

    @property
    def connection(self) -> Connection:
        return connection(self.options)

    def reconnect(self) -> bool:
        with suppress(StoreUnavailable):
            self.connection.reconnect()
        return True

    # --- claiming

    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | None:
        values = (
            operation.scope,
            operation.key,
            token.hex,
            1,
            *self._content(operation),
        )
        try:
            with self.connection.pausing(self._key(operation.id)):
                reply = self._durably(scripts.CLAIM, operation.id, *values)
        except TooFew as error:
            self.connection.run(scripts.RELEASE, self._key(operation.id), token.hex)
            raise StoreRefused(str(error)) from error
        record = _shown(operation.id, reply)
        return (
            Seen(record)
            if record
            else Claimed(operation, token, receipt=reply.decode())
        )

    def _content(self, operation: Operation) -> tuple[Any, ...]:
        """Return what a claim writes of the operation and the policy."""
        mode, hold = self.policy.mode, self.policy.holds_on_crash
        # an operator may have to decide on it
        kept = FOREVER if hold else self._kept_in_progress()
        what = (operation.method, operation.path, operation.fingerprint)
        return (
            *what,
            mode.word,
            int(hold),
            _micro(mode.seconds),
            _micro(self.policy.retention),
            kept,
        )

    def _kept_in_progress(self) -> int:
        return _milli(self.policy.mode.seconds + ABANDONED)

    @contextmanager
    def try_lock(self, id: UUID) -> Iterator[Snapshot | Unlocked]:
        yield self.read(id) or Unlocked.ABSENT

    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        claim = self.successor(record, operation, token)
        values = (_as_seen(record), token.hex, claim.attempt, *self._content(operation))
        try:
            if not self._durably(scripts.REASSIGN, record.id, *values):
                raise StoreConflict(
                    f"The record {record.id} changed while it was being taken over."
                )
        except TooFew as error:
            with suppress(TooFew):
                self._close(claim, Status.FAILED, reason=TAKEOVER_NOT_ACKNOWLEDGED)
            raise StoreRefused(str(error)) from error
        return claim

    def hold(self, record: Snapshot, reason: str) -> None:
        check_move(record.status, Status.FAILED)
        values = (_as_seen(record), reason, _micro(self.policy.retention))
        if not self._durably(scripts.HOLD, record.id, *values):
            raise StoreConflict(
                f"The record {record.id} changed while it was being put on hold."
            )

    def read(self, id: UUID) -> Snapshot | None:
        key = self._key(id)
        with self.connection.pausing(key):
            return _shown(id, self.connection.run(scripts.READ, key))

    # --- running

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        return self._close(claim, status, response=response)

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        return self._close(claim, Status.FAILED, reason=reason, on_hold=on_hold)

    def _close(
        self,
        claim: Claimed,
        status: Status,
        *,
        reason: str = "",
        on_hold: bool = False,
        response: StoredResponse | None = None,
    ) -> bool:
        kept = FOREVER if on_hold else _milli(self.policy.kept_for)
        ends = (
            claim.token.hex,
            status.value,
            reason,
            int(on_hold),
            _micro(self.policy.retention),
            kept,
        )
        return bool(self._durably(scripts.END, claim.id, *ends, *_response(response)))

    def release(self, claim: Claimed) -> bool:
        return bool(
            self.connection.run(scripts.RELEASE, self._key(claim.id), claim.token.hex)
        )

    def may_have_lost(self, claim: Claimed) -> bool:
        given = self.connection.run(scripts.GIVEN, self._key(claim.id))
        return given in (None, claim.token.hex.encode())

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        claims = list(claims)
        times = (_micro(self.policy.mode.seconds), self._kept_in_progress())
        calls = [(self._key(claim.id), claim.token.hex, *times) for claim in claims]
        renewed = self.connection.run_each(scripts.RENEW, calls)
        return {
            claim.token for claim, held in zip(claims, renewed, strict=True) if held
        }

    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        left = self.connection.run_each(scripts.LEASE_LEFT, self._calls(records))
        return {
            token: int(lasts) * MICROSECOND
            for token, lasts in zip(records, left, strict=True)
            if lasts
        }

    def expire(self, records: Mapping[UUID, UUID]) -> None:
        self.connection.run_each(scripts.EXPIRE, self._calls(records))

    def _calls(self, records: Mapping[UUID, UUID]) -> list[tuple[Any, ...]]:
        return [(self._key(id), token.hex) for token, id in records.items()]

    def created_at(self, claim: Claimed) -> datetime | None:
        return _moment(claim.receipt.encode()) if claim.receipt else None

    def count_replays(self, counts: dict[UUID, int]) -> None:
        self.connection.run_each(
            scripts.COUNT_REPLAYS,
            [(self._key(id), count) for id, count in counts.items()],
        )

    # --- maintenance

    def records(self) -> Iterator[Snapshot]:
        """Yield all records, by SCAN on every master. This is slow, and for operators
        only.
        """
        for keys in self.connection.each_master(
            lambda master: list(master.scan_iter(match=self._pattern(), count=1000))
        ):
            for key in dict.fromkeys(keys):  # SCAN may return a key several times
                if record := self.read(UUID(key.decode()[-ID_LENGTH:])):
                    yield record

    def unfinished(self) -> Iterator[Snapshot]:
        """Yield at most ``MOST_UNFINISHED`` records of each of the ``GROUPS``, those on
        hold first.
        """
        groups = [
            (self._key(UUID(bytes=bytes([group, *bytes(15)]))), MOST_UNFINISHED)
            for group in range(GROUPS)
        ]
        ids = [
            UUID(id.decode())
            for found in self.connection.run_each(scripts.UNFINISHED, groups)
            for id in found
        ]
        for some in (
            ids[first : first + AT_ONCE] for first in range(0, len(ids), AT_ONCE)
        ):
            reply = self.connection.run_each(
                scripts.READ_UNFINISHED, [(self._key(id),) for id in some]
            )
            yield from filter(None, map(_shown, some, reply))

    def delete(self, record: Snapshot) -> bool:
        return bool(self._durably(scripts.DELETE, record.id, _as_seen(record)))

    def _pattern(self) -> str:
        escaped = "".join(
            f"\\{letter}" if letter in "*?[]\\^" else letter
            for letter in self.options.prefix
        )
        return escaped + "{??}" + "?" * ID_LENGTH

    def objections(self) -> list[str]:
        masters = self.connection.each_master(methodcaller("info", "memory"))
        policies = {info.get("maxmemory_policy", "noeviction") for info in masters}
        return [
            f"The Redis of the store {self.name!r} evicts keys when memory is full"
            f" (maxmemory-policy {policy}). A key whose record is evicted counts as"
            " new: set maxmemory-policy to noeviction."
            for policy in policies - {"noeviction"}
        ]

    # --- means

    def _key(self, id: UUID) -> str:
        return f"{self.options.prefix}{{{id.hex[:2]}}}{id.hex}"

    def _durably(self, script: scripts.Script, id: UUID, *values: Any) -> Any:
        return self.connection.run_durably(script, self._key(id), *values)


def _micro(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _milli(seconds: float) -> int:
    return FOREVER if seconds >= FOR_GOOD else max(1, round(seconds * 1000))


def _moment(text: bytes) -> datetime:
    return EPOCH + int(text) * MICROSECOND


def _stamp(moment: datetime | None) -> str:
    return "" if moment is None else str((moment - EPOCH) // MICROSECOND)


def _as_seen(record: Snapshot) -> str:
    """Return a text that changes whenever the record does."""
    token = record.token.hex if record.token else ""
    times = (record.locked_until, record.expires_at, record.created_at)
    return " ".join([record.status, token, str(record.attempts), *map(_stamp, times)])


def _response(response: StoredResponse | None) -> tuple[Any, ...]:
    if response is None:
        return "", "", "", 0
    return (
        response.status,
        json.dumps(response.headers),
        response.body or b"",
        int(response.body is not None),
    )


def _shown(id: UUID, reply: bytes) -> Snapshot | None:
    """Return the record ``id`` as a script shows it; ``None`` if the script returned
    only the time.
    """
    end = reply.find(b"\n")
    if end < 0:
        return None
    now, *sizes = reply[:end].split()
    ends = accumulate(map(int, sizes), initial=end + 1)
    return _snapshot(id, now, [reply[start:end] for start, end in pairwise(ends)])


def _snapshot(id: UUID, now: bytes, values: Sequence[bytes]) -> Snapshot:
    """Return a record. ``values``: those of ``scripts.FIELDS``."""
    (
        scope,
        key,
        fingerprint,
        mode,
        hold_on_crash,
        created_at,
        status,
        attempts,
        on_hold,
        *more,
    ) = values
    (
        reason,
        token,
        locked_at,
        locked_until,
        expires_at,
        response_status,
        headers,
        body,
        has_body,
    ) = more
    return Snapshot(
        id=id,
        scope=scope.decode(),
        key=key.decode(),
        fingerprint=fingerprint,
        mode=mode.decode(),
        hold_on_crash=hold_on_crash == b"1",
        created_at=_moment(created_at),
        status=status.decode(),
        attempts=int(attempts),
        on_hold=on_hold == b"1",
        reason=reason.decode(),
        token=UUID(token.decode()) if token else None,
        locked_at=_moment(locked_at) if locked_at else None,
        locked_until=_moment(locked_until) if locked_until else None,
        expires_at=_moment(expires_at),
        response_status=int(response_status) if response_status else None,
        response_headers=json.loads(headers) if response_status else None,
        response_body=body if has_body == b"1" else None,
        now=_moment(now),
    )
