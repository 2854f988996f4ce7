"""The same under Django's own task framework."""

from __future__ import annotations

import json

import pytest

from django_idempotency.policy import Policy
from tests.support.callers import claim, entry_point, paying, record, shift

pytestmark = [pytest.mark.django_tasks, pytest.mark.usefixtures("payer")]

HOUR = 3600


@pytest.fixture
def tasks():
    from django_idempotency.contrib import django_tasks

    return django_tasks


def test_the_tasks_can_be_enqueued_and_do_the_work(tasks):
    claim("stuck", policy=Policy())
    shift("stuck", locked_until=-HOUR)
    for key, purge_at in (("due", -HOUR), ("audit_retention", HOUR)):
        entry_point(paying)(key)
        shift(key, expires_at=-HOUR, purge_at=purge_at)
    results = [tasks.run_pass.enqueue(name, max_seconds=30) for name in ("reap", "cleanup", "drop_bodies")]
    for result in results:
        assert result.status == "SUCCESSFUL", result.errors
        assert json.loads(json.dumps(result.return_value))["finished"]
    assert record("stuck").status == "failed"
    assert record("due") is None
    assert record("audit_retention").response_body is None
