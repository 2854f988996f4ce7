"""Runs without a transaction of the package, with a lease that the heartbeat renews."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import ref

from django.db import DatabaseError

from django_idempotency.engine import leases
from django_idempotency.engine.background import background
from django_idempotency.engine.context import Context
from django_idempotency.engine.redaction import redacted
from django_idempotency.engine.run import Run
from django_idempotency.values.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.values.outcomes import (
    Claimed,
    Fail,
    Keep,
    Release,
    StoredResponse,
    Verdict,
)
from django_idempotency.values.registry import Registry

# functions of wings, called with the verdict of a run in lease mode; each returns the
# one that stands
verdict_hooks: Registry[Callable[[Context, Verdict], Verdict]] = Registry()


class LeaseRun(Run):
    """A run without a transaction of the package, with a lease that the heartbeat
    renews.
    """

    __slots__ = ()

    def begin(self) -> None:
        """Keep the lease until the run ends, or until nobody can end it any more."""
        try:
            leases.keeper_of(self.store).add(self.claim, self.store, run=ref(self))
        except RuntimeError as error:
            self.free(type(error).__name__)
            raise StoreUnavailable(
                "No thread can be started to renew the lease, so nothing was run:"
                f" {error}"
            ) from error

    def free(self, reason: str) -> None:
        """Undo the claim before anything was run. A record of earlier attempts stays:
        they may have had effects.
        """
        self.ended = True
        self._drop_lease()
        self.abandon(Release() if self.claim.attempt == 1 else Fail(reason))

    def _carry_out(self, verdict: Verdict, error: BaseException | None) -> None:
        for hook in verdict_hooks:
            verdict = hook(self.context, verdict)
        try:
            self._complete(verdict)
        except StoreUnavailable as away:
            # The effects have happened. The lease is kept until the verdict is written,
            # once the store is back.
            self.report(away)
            with suppress(RuntimeError):  # then the lease is no longer renewed
                leases.keeper_of(self.store).add(self.claim, self.store, finished=True)
            background.complete(partial(self._complete, verdict), self.store)
        except BaseException as failed:
            self._drop_lease()
            if error is None or not isinstance(failed, ClaimLost | DatabaseError):
                raise
            self.report(failed)

    def _abort(self, error: BaseException) -> None:
        """Complete the record. Effects stay, so a verdict reached before the error
        stands.
        """
        if self.verdict is not None:
            return self._carry_out(
                redacted(self.verdict, self.policy.body, self.claim.operation), error
            )
        crashed = not isinstance(error, Exception)
        try:
            self.abandon(
                Fail(
                    type(error).__name__, on_hold=crashed and self.policy.holds_on_crash
                )
            )
        finally:
            self._drop_lease()
        return None

    def _complete(self, verdict: Verdict) -> None:
        """Write the verdict. The lease is needed no longer then, nor once the claim is
        lost.
        """
        try:
            self._write_verdict(verdict)
        except ClaimLost:
            self._drop_lease()
            raise
        self._drop_lease()

    def _write_verdict(self, verdict: Verdict) -> None:
        try:
            self.write_and_announce(verdict)
        except DatabaseError as error:
            if not isinstance(verdict, Keep):
                raise
            self.report(error)
            self.write_and_announce(
                replace(
                    verdict, response=StoredResponse(verdict.response.status, body=None)
                )
            )

    def write(self, verdict: Verdict) -> None:
        """Write ``verdict``, even if the store may have lost the record: its failover
        is no other attempt.
        """
        try:
            super().write(verdict)
        except ClaimLost:
            if self.store.read(self.claim.id) is not None:
                raise
            if not self.store.may_have_lost(self.claim):
                raise
            if not isinstance(verdict, Release):
                self._claim_anew()
                super().write(verdict)

    def _claim_anew(self) -> None:
        claimed = self.store.claim(self.claim.operation, self.claim.token)
        if not isinstance(claimed, Claimed):
            raise ClaimLost
        # another life may be encrypted anew
        self.claim, self.stored = self.claim.with_receipt(claimed.receipt), None

    def _drop_lease(self) -> None:
        leases.keeper_of(self.store).drop(self.claim)
