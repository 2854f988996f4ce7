"""Fixtures of maintenance."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_long_watch(short_watch):
    """No test here is about how long leases are watched."""
