"""The same under Django's own task framework."""

from __future__ import annotations

import json

import pytest

from tests.support.maintained import all_done, work_for_all

pytestmark = [pytest.mark.django_tasks, pytest.mark.usefixtures("payer")]


def test_the_tasks_can_be_enqueued_and_do_the_work():
    from django_idempotency.contrib import django_tasks

    work_for_all()
    results = [
        django_tasks.run_pass.enqueue(name, max_seconds=30)
        for name in ("reap", "cleanup", "drop_bodies")
    ]
    for result in results:
        assert result.status == "SUCCESSFUL", result.errors
        assert json.loads(json.dumps(result.return_value))["finished"]
    assert all_done()
