"""Several operations at once: claimed by one statement and run in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

from django_idempotency.engine.atomic_runs import AtomicRun
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.policy import Policy
from django_idempotency.stores import PostgreSQLStore, store_for
from django_idempotency.values.outcomes import Claimed, Keep, Operation, Verdict


def place(operation: Operation, policy: Policy) -> str | None:
    """Return the place of the record of ``operation``. Operations with the same place, on PostgreSQL, form a batch."""
    store = store_for(policy, operation)
    return store.name if isinstance(store, PostgreSQLStore) else None


class Batch:
    """Runs claimed operations in one business transaction, each behind its own savepoint.

    ``running``: whether one of them is running.
    """

    def __init__(self, claims: Sequence[Claimed], policy: Policy) -> None:
        store = store_for(policy, claims[0].operation)
        assert isinstance(store, PostgreSQLStore)
        self.claims = claims
        self.policy = policy
        self.store = store
        self.transaction = store.transaction()
        self.transaction.owner = self
        self.running = self.ending = False
        self.owned: dict[UUID, Claimed] = {}
        self.runs: list[tuple[AtomicRun, Keep]] = []

    def begin(self) -> None:
        self.transaction.begin()
        self.owned = {claim.token: claim for claim in self.store.lock_many(self.claims)}

    def run(self, claim: Claimed, work: Callable[[AtomicRun], Verdict | None]) -> bool:
        """Run ``work``, and return whether its verdict is one that a batch can write: to keep what was done.

        Otherwise, and if it raises, what it has written is undone, and the claim is still held. ``work`` is not run if
        the claim is lost.
        """
        owned = self.owned.get(claim.token)
        if owned is None:
            return False
        run = AtomicRun(owned, self.policy, self.store, self.transaction)
        kept: list[Keep] = []

        def keeps() -> bool:
            verdict = work(run)
            if isinstance(verdict, Keep) and not verdict.rollback and not verdict.failure:
                kept.append(run.redacted(verdict))
            return bool(kept)

        self.running = True
        try:
            done = self.transaction.behind_savepoint(keeps)
        finally:
            self.running = False
        self.runs += [(run, verdict) for verdict in kept]
        return done

    def end(self) -> None:
        """Complete the records, and commit them with the effects."""
        results = [(run.claim, self.store.encode(verdict.response, run.claim)) for run, verdict in self.runs]
        if self.runs:
            self.transaction.take_over_hooks(self.runs[0][0].report_after_commit)
            self.transaction.end_with_next_write()
        if results and self.store.complete_many(results) != len(results):
            raise ClaimLost
        self.transaction.commit()
        for run, verdict in self.runs:
            run.announce(verdict)

    def abort(self, error: BaseException) -> None:
        with suppress(StoreUnavailable):
            self.transaction.abort(error)
