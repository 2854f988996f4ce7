"""Several operations at once: claimed by one statement and run in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from django_idempotency.engine.executions import AtomicExecution, Execution
from django_idempotency.exceptions import ClaimLost
from django_idempotency.outcomes import Claimed, Keep, Operation
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for


def place(operation: Operation, policy: Policy) -> str:
    """Return the place of the record of ``operation``. Operations with the same place can form a batch."""
    return store_for(policy, operation).name


class Batch:
    """Runs claimed operations in one business transaction, each behind its own savepoint."""

    def __init__(self, claims: Sequence[Claimed], policy: Policy) -> None:
        self.claims = claims
        self.policy = policy
        self.store = store_for(policy, claims[0].operation)
        self.run_behind_savepoint = self.store.savepoints()
        self.owned: set[object] = set()
        self.runs: list[AtomicExecution] = []

    def run(self, claim: Claimed, work: Callable[[Execution], None]) -> bool:
        """Run ``work``, which must settle on a ``Keep`` verdict. Return false, and don't run it, if the claim is lost.

        An exception undoes what ``work`` has written, and propagates. The claim is still held then.
        """
        if claim.token not in self.owned:
            return False
        run = AtomicExecution(claim, self.policy)
        self.run_behind_savepoint(lambda: work(run))
        self.runs.append(run)
        return True

    @contextmanager
    def running(self) -> Iterator[Batch]:
        with self.store.transaction():
            self.owned = set(self.store.lock_many(self.claims))
            expect_transaction = self._watch()
            yield self
            expect_transaction()
            self._complete()
            if self.runs:
                self.store.take_over_hooks(self.runs[0].report_after_commit)
        for run in self.runs:
            run.announce(run.settled())

    def _watch(self) -> Callable[[], None]:
        owned = (claim for claim in self.claims if claim.token in self.owned)
        one = next(owned, None)
        return (lambda: None) if one is None else self.store.watch_transaction(one)

    def _complete(self) -> None:
        results = []
        for run in self.runs:
            verdict = run.settled()
            assert isinstance(verdict, Keep)
            results.append((run.claim, self.store.encode(verdict.response, run.claim)))
        if results and self.store.complete_many(results) != len(results):
            raise ClaimLost
