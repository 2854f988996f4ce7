"""A store as a project may write one, in the memory of one process; and some that don't
keep what they promise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django_idempotency.stores.base import Seen, Store, Unlocked
from django_idempotency.values.outcomes import (
    Claimed,
    Operation,
    Snapshot,
    StoredResponse,
)

ENDED = {"token": None, "locked_at": None, "locked_until": None}
NO_RESPONSE = {"response_status": None, "response_headers": None, "response_body": None}


class MemoryStore(Store):
    rows: dict[UUID, Snapshot] = {}
    mutex = threading.RLock()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | None:
        with self.mutex:
            if record := self.read(operation.id):
                return Seen(record)
            self.rows[operation.id] = self._new(operation, token)
            return Claimed(operation, token)

    def _new(self, operation: Operation, token: UUID) -> Snapshot:
        now = self.now()
        return Snapshot(
            id=operation.id,
            scope=operation.scope,
            key=operation.key,
            fingerprint=operation.fingerprint,
            mode=self.policy.mode.word,
            hold_on_crash=self.policy.holds_on_crash,
            created_at=now,
            status="processing",
            attempts=1,
            on_hold=False,
            reason="",
            token=token,
            locked_at=now,
            locked_until=now + timedelta(seconds=self.policy.mode.seconds),
            expires_at=now + timedelta(seconds=self.policy.retention),
            **NO_RESPONSE,
            now=now,
        )

    @contextmanager
    def try_lock(self, id: UUID) -> Iterator[Snapshot | Unlocked]:
        with self.mutex:
            yield self.read(id) or Unlocked.ABSENT

    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        claim = self.successor(record, operation, token)
        self.rows[record.id] = replace(
            self._new(operation, token), attempts=claim.attempt
        )
        return claim

    def hold(self, record: Snapshot, reason: str) -> None:
        self.rows[record.id] = self._closed(
            record, status="failed", on_hold=True, reason=reason
        )

    def read(self, id: UUID) -> Snapshot | None:
        record = self.rows.get(id)
        return record and replace(record, now=self.now())

    def records(self) -> Iterator[Snapshot]:
        yield from (
            replace(record, now=self.now()) for record in list(self.rows.values())
        )

    def delete(self, record: Snapshot) -> bool:
        with self.mutex:
            found = self.rows.get(record.id)
            return (
                found is not None
                and found.version == record.version
                and bool(self.rows.pop(record.id))
            )

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        kept = {
            "response_status": response.status,
            "response_headers": response.headers,
            "response_body": response.body,
        }
        return self._close(claim, status="failed" if failure else "completed", **kept)

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        return self._close(claim, status="failed", reason=reason, on_hold=on_hold)

    def _close(self, claim: Claimed, **values: Any) -> bool:
        with self.mutex:
            record = self.owned(claim)
            if record is not None:
                self.rows[claim.id] = self._closed(record, **values)
            return record is not None

    def _closed(self, record: Snapshot, **values: Any) -> Snapshot:
        expires_at = self.now() + timedelta(seconds=self.policy.retention)
        return replace(record, **ENDED, expires_at=expires_at, **values)

    def release(self, claim: Claimed) -> bool:
        with self.mutex:
            return self.owned(claim) is not None and self.rows.pop(claim.id) is not None

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        with self.mutex:
            held = [
                (claim, record) for claim in claims if (record := self.owned(claim))
            ]
            until = self.now() + timedelta(seconds=self.policy.mode.seconds)
            self.rows.update(
                {
                    claim.id: replace(record, locked_until=until)
                    for claim, record in held
                }
            )
            return {claim.token for claim, _record in held}

    def owned(self, claim: Claimed) -> Snapshot | None:
        record = self.rows.get(claim.id)
        return record if record is not None and record.token == claim.token else None

    def leases_left(self, records):
        now = self.now()
        held = {
            record.token: record
            for id in records.values()
            if (record := self.rows.get(id))
        }
        return {
            token: held[token].locked_until - now for token in records if token in held
        }

    def expire(self, records):
        with self.mutex:
            for token, left in self.leases_left(records).items():
                if left < timedelta(0):
                    record = self.rows[records[token]]
                    self.rows[record.id] = replace(
                        record, locked_until=record.locked_at
                    )

    def count_replays(self, counts: dict[UUID, int]) -> None:
        pass


class Liar(MemoryStore):
    """``caught``: the tests of the contract that must fail on it."""

    caught: tuple[str, ...] = ()


class AcceptsStaleTokens(Liar):
    caught = ("test_a_lost_claim_changes_nothing", "test_a_response_is_final")

    def owned(self, claim):
        return self.rows.get(claim.id)


class AnswersLate(Liar):
    """What it was told is there a little later."""

    caught = ("test_a_response_is_kept_to_the_byte_and_seen_by_all_at_once",)

    def complete(self, claim, response, *, failure=False):
        if self.owned(claim) is None:
            return False
        threading.Timer(
            1, super().complete, (claim, response), {"failure": failure}
        ).start()
        return True


class ClaimsTwice(Liar):
    """A look, and then an insert."""

    caught = ("test_of_claims_at_once_one_makes_the_record",)

    def claim(self, operation, token):
        if record := self.read(operation.id):
            return Seen(record)
        time.sleep(0.1)
        self.rows[operation.id] = self._new(operation, token)
        return Claimed(operation, token)


class TakesOverTwice(Liar):
    """A look, and then a change of whatever is there by then."""

    caught = (
        "test_of_takeovers_at_once_one_succeeds",
        "test_a_renewal_and_a_takeover_do_not_both_succeed",
        "test_a_dead_owner_is_taken_over_once_its_lease_ran_out",
    )

    @contextmanager
    def try_lock(self, id):
        yield self.read(id) or Unlocked.ABSENT
        time.sleep(0.01)

    def reassign(self, record, operation, token):
        time.sleep(0.1)
        return super().reassign(record, operation, token)


LIARS = Liar.__subclasses__()
