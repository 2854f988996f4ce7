"""Records: stores, claims and transactions. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.engine import (
    Context,
    Pending,
    Run,
    begin_claim,
    claim,
    execution,
)
from django_idempotency.engine.admission import CacheGuard
from django_idempotency.engine.background import background
from django_idempotency.engine.claims import duplicate, replayed
from django_idempotency.engine.digests import as_recorded
from django_idempotency.models import (
    LIVE,
    TERMINAL,
    DatabaseNow,
    IdempotencyRecord,
    Status,
    check_move,
    in_utc,
)
from django_idempotency.stores import configured, database_store, store_for
from django_idempotency.stores.base import Seen, Store, Unlocked
from django_idempotency.stores.claim_function import (
    PARTITIONED,
    TABLE_LOCKS,
    TRANSACTION,
)
from django_idempotency.stores.codec import (
    EPOCH,
    Binding,
    decoded,
    encrypted,
    has_newest_key,
    is_encrypted,
)
from django_idempotency.stores.connections import alias, databases, record_database
from django_idempotency.stores.database import DatabaseOptions, DatabaseStore, ahead
from django_idempotency.stores.errors import is_conflict, sqlstate, store_errors
from django_idempotency.stores.pipeline import execute
from django_idempotency.stores.postgresql import PostgreSQLStore, Receipt
from django_idempotency.stores.transactions import InDoubt, Transaction
from django_idempotency.values.exceptions import (
    MalformedKey,
    MissingKey,
    StoreConflict,
    StoreRefused,
    TransactionEnded,
)
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import (
    Claimed,
    EntryPoint,
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Rejection,
    Release,
    Replay,
    Snapshot,
    StoredResponse,
    Unprotected,
    Verdict,
)

__all__ = [
    "EPOCH",
    "LIVE",
    "PARTITIONED",
    "TABLE_LOCKS",
    "TERMINAL",
    "TRANSACTION",
    "Binding",
    "CacheGuard",
    "Claimed",
    "Context",
    "DatabaseNow",
    "DatabaseOptions",
    "DatabaseStore",
    "EntryPoint",
    "Fail",
    "IdempotencyRecord",
    "InDoubt",
    "InFlight",
    "Keep",
    "MalformedKey",
    "Mismatch",
    "MissingKey",
    "OnHold",
    "Operation",
    "Pending",
    "PostgreSQLStore",
    "Receipt",
    "Rejection",
    "Release",
    "Replay",
    "Run",
    "Seen",
    "Snapshot",
    "Status",
    "Store",
    "StoreConflict",
    "StoreRefused",
    "StoredResponse",
    "Transaction",
    "TransactionEnded",
    "Unlocked",
    "Unprotected",
    "Verdict",
    "ahead",
    "alias",
    "as_recorded",
    "background",
    "begin_claim",
    "check_move",
    "claim",
    "configured",
    "database_store",
    "databases",
    "decoded",
    "duplicate",
    "encrypted",
    "execute",
    "execution",
    "has_newest_key",
    "in_utc",
    "is_conflict",
    "is_encrypted",
    "record_database",
    "record_id",
    "replayed",
    "sqlstate",
    "store_errors",
    "store_for",
]
