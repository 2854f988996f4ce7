"""Statistics, and how they are shown. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.instrumentation.metrics import Gauge, GaugeFamily
from django_idempotency.maintenance.formatting import (
    Figure,
    age,
    amount,
    figures,
    lines,
    share,
)
from django_idempotency.maintenance.stats import due, oldest_pending, pending, size

__all__ = [
    "Figure",
    "Gauge",
    "GaugeFamily",
    "age",
    "amount",
    "due",
    "figures",
    "lines",
    "oldest_pending",
    "pending",
    "share",
    "size",
]
