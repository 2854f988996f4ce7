"""The figures of the outbox, for Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from django_idempotency.contrib.outbox.maintenance import database, figures
from django_idempotency.instrumentation.metrics import Figures, Gauge, GaugeFamily

OR_MORE = "; 100,000 means or more"
GAUGES = (
    Gauge("outbox_pending", f"events that are not published yet{OR_MORE}", {"": "pending"}, unit="{event}"),
    Gauge("outbox_failing", f"those of them that were refused at least once{OR_MORE}", {"": "failing"}, unit="{event}"),
    Gauge("outbox_dead", f"dead letters of the outbox{OR_MORE}", {"": "dead"}, unit="{event}"),
    Gauge("outbox_age", "age of the oldest event that is not published yet, 0 without one", {"": "age"}, unit="s"),
    Gauge("outbox_relays", "live relays", {"": "relays"}, unit="{relay}"),
)


def _by_publisher(using: str) -> Mapping[str, Figures]:
    return {of.publisher: asdict(of) for of in figures(using=using)} if database() == using else {}


FAMILY = GaugeFamily("publisher", GAUGES, _by_publisher)
