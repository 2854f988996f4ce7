"""Views and values that the tests of several laws share."""

from __future__ import annotations

import pytest

from django_idempotency.stores import store_for
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import MODES, claim
from tests.support.sql import value_of
from tests.support.threads import in_threads

row_locks = pytest.mark.row_locks
postgresql = pytest.mark.postgresql
in_both_modes = pytest.mark.parametrize("mode", MODES)
BY_LOCK = pytest.param(
    Atomic(claim="lock"),
    id="lock",
    marks=[pytest.mark.postgresql, pytest.mark.not_on_citus],
)
# in atomic mode, with claims of both kinds
in_each_mode = pytest.mark.parametrize("mode", [*MODES, BY_LOCK])

HOUR = 3600
OTHER_BODY = b'{"amount": 6}'


def terminate(*pids):
    """End these backends as an administrator, or a failover, would; returns once they
    are gone.
    """

    def from_elsewhere(_index):
        for pid in pids:
            assert value_of("SELECT pg_terminate_backend(%s, 60000)", [pid])

    in_threads(1, from_elsewhere)


def completed(answer):
    return answer if answer.status_code == 201 else None


COMPLETION = r"\s*UPDATE .?django_idempotency_record"


def fail(*_args, **_named):
    raise ArithmeticError("asked for")


def on_hold(mode):
    store_for(Policy()).fail(claim(policy=Policy(mode=mode)), "crashed", on_hold=True)
