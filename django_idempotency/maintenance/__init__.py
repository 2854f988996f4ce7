"""Maintenance: free stuck keys and keep the table small.

Each pass runs in batches, and each batch is a short transaction of its own. A pass that
is killed at any point loses nothing, and two passes that run at once do nothing twice.
Times are the database's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.maintenance.cleaner import cleanup, drop_bodies
    from django_idempotency.maintenance.decisions import (
        Refusal,
        allow_retry,
        extend,
        fail,
        resolve,
    )
    from django_idempotency.maintenance.privacy import erase, export, reencrypt
    from django_idempotency.maintenance.reaper import reap
    from django_idempotency.maintenance.sweep import Bounds, Swept

__all__ = [
    "Bounds",
    "Refusal",
    "Swept",
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

# Settings import the table of passes before models are loaded.
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(__all__, f"{__name__}.decisions"),
        **dict.fromkeys(("cleanup", "drop_bodies"), f"{__name__}.cleaner"),
        **dict.fromkeys(("Bounds", "Swept"), f"{__name__}.sweep"),
        **dict.fromkeys(("erase", "export", "reencrypt"), f"{__name__}.privacy"),
        "reap": f"{__name__}.reaper",
    },
)
