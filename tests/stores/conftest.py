"""Each store of this database in turn."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from django.db import (
    connection,
)

from django_idempotency.policy import Policy
from django_idempotency.stores import database
from django_idempotency.stores.base import Store
from tests.stores.contract import STORES
from tests.support.threads import wait_little_for_locks


@pytest.fixture(autouse=True)
def fresh_scope(monkeypatch):
    """No test's records are those of another: replays are counted a little later."""
    monkeypatch.setattr("tests.stores.contract.SCOPE", f"user:{uuid4()}")


@pytest.fixture(params=STORES, ids=lambda store: store.__name__)
def store(request, monkeypatch) -> Callable[[Policy], Store]:
    """Each store of this database in turn; the engine uses it too."""
    monkeypatch.setitem(database.BY_VENDOR, connection.vendor, request.param)
    return lambda policy: request.param(policy, policy.using or "default")


@pytest.fixture
def impatient(transactional_db):
    wait_little_for_locks()
    yield
    connection.close()
