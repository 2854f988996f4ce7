"""The sweep that sends lost hints again, and its schedule. Settings may import this."""

from __future__ import annotations

from django_idempotency.extending import Pass

HINT = Pass(
    name="hint_operations",
    path="django_idempotency.contrib.operations.running.hint",
    every=60.0,
    bounded=False,
)
