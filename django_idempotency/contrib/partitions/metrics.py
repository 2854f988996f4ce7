"""For how long new records have partitions, for Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import connections

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.layout import covered_until
from django_idempotency.instrumentation.metrics import Figures, Gauge, GaugeFamily

GAUGES = (Gauge("partitions_ahead", "for how long, from now on, new records have partitions", {"": "ahead"}, unit="s"),)


def _ahead(using: str) -> Mapping[str, Figures]:
    """Return no figure if the table is plain, or if a default partition takes every record."""
    if connections[using].vendor != "postgresql":
        return {}
    found = read_layout(using=using)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return {} if until is None else {using: {"ahead": (until - found.now).total_seconds()}}


FAMILY = GaugeFamily("database", GAUGES, _ahead)
