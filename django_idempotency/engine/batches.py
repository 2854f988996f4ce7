"""Several operations at once: one statement to claim them, one transaction to run them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from django.db import transaction

from django_idempotency.engine.executions import AtomicExecution, Execution
from django_idempotency.exceptions import ClaimLost
from django_idempotency.outcomes import Claimed, Keep, Operation
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for


def place(operation: Operation, policy: Policy) -> str:
    """Return where the record of ``operation`` is: with operations of one place there can be a batch."""
    return store_for(policy, operation).name


class Batch:
    """Runs claimed operations in one business transaction, each behind a savepoint of its own."""

    def __init__(self, claims: Sequence[Claimed], policy: Policy) -> None:
        self.claims = claims
        self.policy = policy
        self.store = store_for(policy, claims[0].operation)
        self.owned: set[object] = set()
        self.runs: list[Execution] = []

    def run(self, claim: Claimed, work: Callable[[Execution], None]) -> bool:
        """Run ``work``, which settles on a verdict to keep; false if the claim is lost, and it did not run.

        An exception undoes what ``work`` has written, and passes. The claim is still held then.
        """
        if claim.token not in self.owned:
            return False
        run = AtomicExecution(claim, self.policy)
        with transaction.atomic(using=self.store.name):
            work(run)
        self.runs.append(run)
        return True

    @contextmanager
    def running(self) -> Iterator[Batch]:
        with self.store.transaction():
            self.owned = set(self.store.lock_many(self.claims))
            yield self
            self._complete()
        for run in self.runs:
            run.announce(run.settled())

    def _complete(self) -> None:
        results = []
        for run in self.runs:
            verdict = run.settled()
            assert isinstance(verdict, Keep)
            results.append((run.claim, self.store.encode(verdict.response, run.claim)))
        if results and self.store.complete_many(results) != len(results):
            raise ClaimLost
