"""A role's ``statement_timeout`` is for requests: maintenance states how long its own statements may take."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from tests.support.callers import entry_point, paying, shift
from tests.support.maintained import HOUR, run_sql
from tests.support.threads import just_before

pytestmark = pytest.mark.postgresql


@pytest.fixture
def hurried(payer):
    """One key that is due, and a session whose statements may take 0.3 seconds."""
    assert entry_point(paying)("k").status_code == 201
    shift("k", expires_at=-HOUR, purge_at=-HOUR)
    run_sql("SET statement_timeout = '300ms'")
    yield
    run_sql("RESET statement_timeout")


@pytest.mark.parametrize(
    ("command", "step"),
    [
        (("idempotency_cleanup",), r"\s*WITH picked"),
        (("idempotency_cleanup", "--dry-run"), r"SELECT COUNT"),
        (("idempotency_privacy", "erase", "--scope=custom:public"), ".* LIMIT"),
        (("idempotency_privacy", "erase", "--scope=custom:public", "--dry-run"), '.*"on_hold" FROM'),
        (("idempotency_privacy", "export", "--scope=custom:public"), ".*has_body"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_slow_statement_of_maintenance_is_not_cancelled(hurried, capsys, command, step):
    with just_before(step, lambda: run_sql("SELECT pg_sleep(0.4)")):
        call_command(*command)
    assert run_sql("SHOW statement_timeout") == [("300ms",)]
