"""The admin: alarms, pages, decisions. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.admin.alarms import Alarm, alarms
from django_idempotency.admin.pages import (
    RESPONSE_BODY,
    Page,
    ReadOnly,
    choices,
    database_of,
    panel,
    query_of,
    readable,
)
from django_idempotency.maintenance.decision_forms import Decision

__all__ = [
    "RESPONSE_BODY",
    "Alarm",
    "Decision",
    "Page",
    "ReadOnly",
    "alarms",
    "choices",
    "database_of",
    "panel",
    "query_of",
    "readable",
]
