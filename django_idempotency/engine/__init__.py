"""The engine of all entry points: claim, run, complete. It is the only caller of the stores.

The outcome of a claim is one of a closed set of values. A ``Claimed`` operation runs inside ``execution()``, which
completes the record according to the verdict that the entry point settles on.
"""

from __future__ import annotations

from django_idempotency.engine.batches import Batch, place
from django_idempotency.engine.claims import (
    Pending,
    begin_claim,
    claim,
    claim_many,
    duplicate,
    in_transaction,
    until_due,
)
from django_idempotency.engine.decisions import decide
from django_idempotency.engine.executions import Context, Execution, aexecution, execution, give_back
from django_idempotency.engine.shielding import shielded

__all__ = [
    "Batch",
    "Context",
    "Execution",
    "Pending",
    "aexecution",
    "begin_claim",
    "claim",
    "claim_many",
    "decide",
    "duplicate",
    "execution",
    "give_back",
    "in_transaction",
    "place",
    "shielded",
    "until_due",
]
