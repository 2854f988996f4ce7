"""Fixtures of the instruments."""

from __future__ import annotations

import pytest

from django_idempotency.instrumentation import metrics


@pytest.fixture(autouse=True)
def fresh_figures():
    """No figures of an earlier test's table."""
    metrics._tables.clear()
    yield
    metrics._tables.clear()


@pytest.fixture
def registry():
    from prometheus_client import CollectorRegistry

    from django_idempotency.instrumentation import prometheus

    registry = CollectorRegistry()
    prometheus.install(registry)
    yield registry
    prometheus.uninstall(registry)
