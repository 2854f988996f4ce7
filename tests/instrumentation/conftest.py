"""Fixtures of the instruments."""

from __future__ import annotations

import pytest

from django_idempotency.instrumentation import metrics
from django_idempotency.reporting import events


@pytest.fixture(autouse=True)
def fresh_figures(monkeypatch):
    """No figures of an earlier test's table, and one reading of it however slow a test
    is.
    """
    monkeypatch.setattr(metrics, "FRESH", 3600.0)
    metrics._tables.clear()
    yield
    metrics._tables.clear()


@pytest.fixture
def registry(monkeypatch):
    from prometheus_client import CollectorRegistry

    from django_idempotency.instrumentation import prometheus

    monkeypatch.setattr(events.receivers, "_items", [*events.receivers])
    registry = CollectorRegistry()
    prometheus.install(registry)
    return registry
