"""Maintenance: free stuck keys and keep the table small.

Each pass runs in batches, and each batch is a short transaction of its own. A pass that is killed at any point loses
nothing, and two passes that run at once do nothing twice. Times are the database's.
"""

from __future__ import annotations

from django_idempotency.maintenance.cleaner import Cleaned, cleanup, drop_bodies
from django_idempotency.maintenance.erasure import Erased, erase
from django_idempotency.maintenance.export import export
from django_idempotency.maintenance.interventions import Done, Refusal, Refused, allow_retry, extend, fail, resolve
from django_idempotency.maintenance.reaper import Reaped, reap
from django_idempotency.maintenance.reencryption import Reencrypted, reencrypt

__all__ = [
    "Cleaned",
    "Done",
    "Erased",
    "Reaped",
    "Reencrypted",
    "Refusal",
    "Refused",
    "allow_retry",
    "cleanup",
    "drop_bodies",
    "erase",
    "export",
    "extend",
    "fail",
    "reap",
    "reencrypt",
    "resolve",
]
