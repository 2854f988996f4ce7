"""The engine of all entry points: claim, run, complete. It is the only caller of the
stores.

``begin()`` returns a ``Run``, or one of a closed set of outcomes for a duplicate.
``Run.end()`` completes the record with the entry point's verdict.
"""

from __future__ import annotations

from django_idempotency.engine.atomic_runs import Batch, batched_in
from django_idempotency.engine.beginning import (
    awaited,
    begin,
    begin_again,
    begin_claimed,
    begin_or_wait,
    execution,
    shielded,
    undo_begin,
)
from django_idempotency.engine.claims import claim_many, duplicate, in_transaction
from django_idempotency.engine.context import Context, Unclaimed, current, entered
from django_idempotency.engine.run import Run
from django_idempotency.engine.waiting import Pending, begin_claim, claim
from django_idempotency.stores.connections import alias, routed

__all__ = [
    "Batch",
    "Context",
    "Pending",
    "Run",
    "Unclaimed",
    "alias",
    "awaited",
    "batched_in",
    "begin",
    "begin_again",
    "begin_claim",
    "begin_claimed",
    "begin_or_wait",
    "claim",
    "claim_many",
    "current",
    "duplicate",
    "entered",
    "execution",
    "in_transaction",
    "routed",
    "shielded",
    "undo_begin",
]
