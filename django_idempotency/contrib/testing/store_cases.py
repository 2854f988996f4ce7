"""What the tests of a store's contract do with a store: claims, takeovers, threads, and
time that passes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID, uuid4

from django.db import connections

from django_idempotency import Policy
from django_idempotency.extending.stores import (
    Claimed,
    Mismatch,
    Operation,
    Seen,
    Snapshot,
    Store,
    Verdict,
    claim,
    execution,
    store_for,
)

T = TypeVar("T")

PATIENCE = 20.0  # seconds
RIVALS = 8


class StoreCase:
    """``alias``: the store's alias in ``STORES``. ``close``: called at the end of each
    thread that used the store.
    """

    alias = "default"

    def close(self) -> None:
        connections.close_all()

    def policy(self, **options: Any) -> Policy:
        return Policy(**{"mode": "lease", "store": self.alias} | options)

    def store(self, **options: Any) -> Store:
        return store_for(self.policy(**options))

    def operation(
        self, key: str | None = None, *, body: bytes = b"", scope: str = "contract"
    ) -> Operation:
        return Operation(
            scope,
            key or str(uuid4()),
            hashlib.sha256(body).digest(),
            "POST",
            "/charges/",
        )

    def claimed(
        self, store: Store | None = None, operation: Operation | None = None
    ) -> Claimed:
        claim = (store or self.store()).claim(operation or self.operation(), uuid4())
        assert isinstance(claim, Claimed), f"a new key was not claimed: {claim}"
        return claim

    def claimed_again(
        self, operation: Operation, token: UUID | None = None
    ) -> Snapshot:
        """Claim a key that has a record, and return the record that this shows."""
        seen = self.store().claim(operation, token or uuid4())
        assert isinstance(seen, Seen), (
            f"a claim of a key that has a record returned {seen}"
        )
        return seen.record

    def seen(self, claim: Claimed, **expected: Any) -> Snapshot:
        """Return the record of a claim, which has the ``expected`` values."""
        record = self.store().read(claim.id)
        assert record is not None, "a record that was created is missing"
        found = {name: getattr(record, name) for name in expected}
        assert found == expected, f"the record has {found}, not {expected}"
        return record

    def lease_end(self, claim: Claimed) -> datetime:
        until = self.seen(claim).locked_until
        assert until is not None, "a record that is being processed has no lease"
        return until

    @contextmanager
    def unchanged(self, id: UUID, by: str) -> Iterator[None]:
        """The record, or its absence, is the same after the block."""
        before = still(self.store().read(id))
        yield
        assert still(self.store().read(id)) == before, f"{by} changed the record"

    @contextmanager
    def shown(self, claim: Claimed) -> Iterator[Snapshot]:
        with self.store().try_lock(claim.id) as record:
            assert isinstance(record, Snapshot), (
                f"a record that is not locked was reported as {record}"
            )
            yield record

    def taken_over(self, claim: Claimed, token: UUID | None = None) -> Claimed:
        with self.shown(claim) as record:
            return self.store().reassign(record, claim.operation, token or uuid4())

    def held(self, claim: Claimed, store: Store | None = None) -> None:
        with self.shown(claim) as record:
            (store or self.store()).hold(record, "outcome unknown")

    def at_once(self, work: Callable[[int], T], rivals: int = RIVALS) -> list[T]:
        """Run ``work(0)``, ``work(1)`` … in a thread each, all started together, and
        return their results.
        """
        barrier = threading.Barrier(rivals)

        def run(number: int) -> T:
            try:
                barrier.wait(PATIENCE)
                return work(number)
            finally:
                self.close()

        with ThreadPoolExecutor(rivals) as pool:
            return list(pool.map(run, range(rivals)))

    def lapse(self, claim: Claimed) -> None:
        """Wait until the lease has run out by the store's clock, and expire it as the
        engine does after watching it.
        """
        self.after(self.lease_end(claim))
        self.store().expire({claim.token: claim.id})
        assert self.seen(claim).lease_expired, "a lapsed lease did not expire"

    def after(self, moment: datetime) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.seen(self.claimed()).now <= moment:
            assert time.monotonic() < deadline, (
                f"the store's clock does not reach {moment}"
            )
            time.sleep(0.05)

    def asked(self, operation: Operation, **options: Any) -> Any:
        return claim(operation, self.policy(**options))

    def performed(
        self, operation: Operation, verdict: Verdict, **options: Any
    ) -> Claimed:
        claim = self.asked(operation, **options)
        assert isinstance(claim, Claimed), f"could not be run: {claim}"
        with execution(claim, self.policy(**options)) as running:
            running.verdict = verdict
        return claim

    def refuses_another(self, operation: Operation) -> None:
        """Another request with the same key is a mismatch, before anything else is
        decided.
        """
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()


def still(record: Snapshot | None) -> Snapshot | None:
    """Return what stays the same while no caller writes."""
    return record and replace(record, now=record.created_at)
