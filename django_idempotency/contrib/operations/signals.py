"""Signals about deferred operations."""

from __future__ import annotations

from django.dispatch import Signal

# record_id, using: an operation may be run, by run_operation(record_id, using=using);
# the sender is its name. Sent again by each sweep until it is done.
operation_due = Signal()
