"""The passes that keep a partitioned table, for task queues. On a plain table they do nothing."""

from __future__ import annotations

from django_idempotency.maintenance.passes import Pass

PASSES = tuple(
    Pass(
        name=f"{action}_partitions",
        path=f"django_idempotency.contrib.partitions.{module}.{action}",
        every=3600.0,
        bounded=False,
    )
    for module, action in (("provisioning", "ensure"), ("dropping", "drop"))
)
