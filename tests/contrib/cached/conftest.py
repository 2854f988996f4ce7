"""A cache in front that a busy machine may keep waiting."""

from __future__ import annotations

import pytest

from django_idempotency.contrib import cached


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A cache that was late would not be asked for the next seconds."""
    monkeypatch.setattr(cached, "PATIENCE", 60.0)
