"""Partitions of the record table, on PostgreSQL: retention by DROP instead of DELETE."""

from __future__ import annotations

from django_idempotency.partitions.conversion import Converted, Plan, disable, disable_plan, enable, enable_plan
from django_idempotency.partitions.dropping import Dropped, drop, drop_plan
from django_idempotency.partitions.provisioning import Ensured, ensure, ensure_plan
from django_idempotency.partitions.report import Status, status

__all__ = [
    "Converted",
    "Dropped",
    "Ensured",
    "Plan",
    "Status",
    "disable",
    "disable_plan",
    "drop",
    "drop_plan",
    "enable",
    "enable_plan",
    "ensure",
    "ensure_plan",
    "status",
]
