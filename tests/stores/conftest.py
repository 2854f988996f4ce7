"""Fixtures of the stores."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection

from tests.support.threads import wait_little_for_locks


@pytest.fixture(autouse=True)
def fresh_scope(monkeypatch):
    """No test's records are those of another: replays are counted a little later."""
    monkeypatch.setattr("tests.stores.contract.SCOPE", f"user:{uuid4()}")


@pytest.fixture
def impatient(transactional_db):
    wait_little_for_locks()
    yield
    connection.close()
