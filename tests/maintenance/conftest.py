"""Fixtures of maintenance."""

from __future__ import annotations

import pytest
from django.test import modify_settings

from django_idempotency.maintenance import history
from django_idempotency.values.registry import Registry


@pytest.fixture(autouse=True)
def no_long_watch(short_watch):
    """No test here is about how long leases are watched."""


@pytest.fixture
def no_history(monkeypatch):
    """Neither the admin nor an app keeps a history."""
    # apps get ready again, and register
    with modify_settings(INSTALLED_APPS={"remove": ["django.contrib.admin"]}):
        monkeypatch.setattr(history, "logs_of_wings", Registry())
        yield
