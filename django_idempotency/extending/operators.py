"""Checks, commands, maintenance and decisions. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.checks import Check, Database, each
from django_idempotency.engine.digests import response_digest
from django_idempotency.maintenance.companions import Companion, progress_of
from django_idempotency.maintenance.decision_forms import TEXT, Intervention
from django_idempotency.maintenance.decisions import (
    Act,
    OperatorDecision,
    lacks_second,
    objection_to,
)
from django_idempotency.maintenance.history import lacks_note, write_entry
from django_idempotency.maintenance.passes import run_pass
from django_idempotency.maintenance.records import is_sharded, records
from django_idempotency.management.base import (
    MaintenanceCommand,
    ended_by_signal,
    number,
)

__all__ = [
    "TEXT",
    "Act",
    "Check",
    "Companion",
    "Database",
    "Intervention",
    "MaintenanceCommand",
    "OperatorDecision",
    "each",
    "ended_by_signal",
    "is_sharded",
    "lacks_note",
    "lacks_second",
    "number",
    "objection_to",
    "progress_of",
    "records",
    "response_digest",
    "run_pass",
    "write_entry",
]
