"""Fixtures of the interleavings."""

from __future__ import annotations

import pytest

from tests.faults.world import World


@pytest.fixture
def world(monkeypatch):
    return lambda *args, **policy: World(monkeypatch, *args, **policy)
