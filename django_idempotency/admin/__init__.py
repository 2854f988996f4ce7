"""The admin of idempotency records."""

from __future__ import annotations

from django_idempotency.admin.records import IdempotencyRecordAdmin

__all__ = ["IdempotencyRecordAdmin"]
