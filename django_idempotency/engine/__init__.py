"""The one engine: claim, run, complete. The only caller of the stores.

A claim's outcome is a value of a closed set. A ``Claimed`` operation runs inside ``execution()``, which completes the
record by the verdict on which the entry point settles.
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
