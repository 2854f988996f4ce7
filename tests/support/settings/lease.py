"""The payments service with every view in lease mode and a lease that a test can outlive."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403

IDEMPOTENCY = {"MODE": "lease", "LEASE": 3}  # type: ignore[dict-item]
