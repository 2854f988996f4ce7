"""L9: time is the database's clock."""

from __future__ import annotations

import ast
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import django_idempotency
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import (
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    paying,
    shift,
)
from tests.support.views_of_laws import HOUR, in_each_mode, row_locks

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture(params=[-HOUR, HOUR], ids=["an hour behind", "an hour ahead"])
def clock(request, monkeypatch):
    """The application's clock, jumped: whatever Python, Django and the package can read
    it by.
    """
    real_time, jump = time.time, timedelta(seconds=request.param)

    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + jump

        @classmethod
        def utcnow(cls):
            return cls.now(None)

    monkeypatch.setattr(time, "time", lambda: real_time() + request.param)
    monkeypatch.setattr("django.utils.timezone.datetime", Jumped)
    monkeypatch.setattr("django_idempotency.values.outcomes.datetime", Jumped)


@row_locks
@pytest.mark.usefixtures("clock")
@in_each_mode
def test_l9_an_application_clock_that_jumped_changes_nothing(mode):
    gate, policy = Gate(), {"mode": mode, "retention": 60}
    with gate.running(**policy) as answer:
        assert entry_point(paying, **policy)().status_code == 409
    first = answer.result()
    assert entry_point(paying, **policy)().content == first.content
    shift(expires_at=-1, purge_at=-1)
    assert not is_replay(entry_point(paying, **policy)())
    assert effects() == 2


@pytest.mark.usefixtures("clock")
def test_l9_a_lease_runs_out_by_the_databases_clock():
    policy = {"mode": Lease(seconds=60)}
    claim(policy=Policy(**policy))
    refused = entry_point(paying, **policy)()
    assert refused.status_code == 409
    # by a clock an hour ahead it would be a sixth of the lease
    assert int(refused.headers["Retry-After"]) < 10
    shift(locked_until=-1)
    assert entry_point(paying, **policy)().status_code == 201


# By their clock no key is claimed, kept or taken over.
DECIDE_NOTHING_ABOUT_KEYS = {
    "messages/celery.py",  # when a worker takes a message again, by Celery's clock
    # in which minute a new key is counted for a limit: a jump begins another count
    "engine/admission.py",
    "tasks.py",  # when beat runs a task first, by beat's own clock
    # the time in an event's id, which keeps neighbours together in their index
    "contrib/outbox/publishing.py",
    # the timestamp that Standard Webhooks signs
    "contrib/outbox/publishers/webhooks.py",
    "webhooks.py",  # how old a signature may be, by its sender's clock
}


def test_l9_decisions_do_not_read_the_applications_clock():
    root = Path(django_idempotency.__file__).parent
    readers = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if reads_clock(path)
    }
    known = {
        path
        for path in DECIDE_NOTHING_ABOUT_KEYS
        if (root / "contrib").is_dir() or not path.startswith("contrib")
    }
    assert readers == known


def reads_clock(path):
    """Calls such as ``time.time()``, ``datetime.now()`` and ``timezone.now()``;
    monotonic clocks don't jump.
    """
    calls = (
        node.func
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    )
    return any(
        ast.unparse(call).endswith(
            ("time.time", "time_ns", ".now", ".utcnow", ".today")
        )
        for call in calls
    )
