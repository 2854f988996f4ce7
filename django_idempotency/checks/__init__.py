"""System checks, which find what is wrong with a configuration before it costs money.

Each has a stable id, and is described in ``docs/checks.md``. Importing this package registers all of them.
"""

from __future__ import annotations

from django_idempotency.checks import (
    consumers,
    databases,
    deployment,
    entry_points,
    guards,
    keys,
    middleware,
    policies,
    settings,
    stores,
    views,
)

__all__ = [
    "consumers",
    "databases",
    "deployment",
    "entry_points",
    "guards",
    "keys",
    "middleware",
    "policies",
    "settings",
    "stores",
    "views",
]
