"""L1, L3, L4, L6: a claim that is a lock, whose owner is killed, or loses its
connection, at each of its steps.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import cycle

import pytest
from django.db import connection

from django_idempotency import engine
from django_idempotency.engine.decisions import ASK_AGAIN
from django_idempotency.stores.claim_function import MEET
from django_idempotency.stores.lock_claims import LockClaimStore
from django_idempotency.values.outcomes import Claimed
from django_idempotency.values.policy import Atomic, Policy
from tests.laws.test_lock_claims import KINDS, by_lock, elsewhere
from tests.support.callers import (
    effects,
    entry_point,
    is_replay,
    operation,
    pay,
    paying,
    record,
)
from tests.support.owner_process import AFTER_EFFECT, IN_VIEW, stopping
from tests.support.threads import just_after, just_before
from tests.support.views_of_laws import OTHER_BODY, completed, terminate
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer"),
]

CLAIM, INSERT = "SELECT pg_backend_pid", "INSERT INTO django_idempotency_record"
RUNNING = (
    f"after {CLAIM}",
    IN_VIEW,
    AFTER_EFFECT,
    f"before {INSERT}",
    f"after {INSERT}",
    "before COMMIT",
)
BEFORE, AFTER = f"before {CLAIM}", "after COMMIT"


@pytest.mark.parametrize(
    ("point", "other"), [*zip((BEFORE, *RUNNING, AFTER), cycle(KINDS), strict=False)]
)
def test_an_owner_that_is_killed_leaves_all_or_nothing(point, other):
    retry = entry_point(paying, mode=Atomic(claim=other))
    with stopping(point, mode=Atomic(claim="lock")) as owner:
        if point in RUNNING:
            assert (record(), effects()) == (None, 0)
            assert retry().status_code == 409
            assert retry(body=OTHER_BODY).status_code == 422
        owner.kill()
        # once the database sees that it is gone
        answer = eventually(lambda: completed(retry()))
    assert (is_replay(answer), effects(), record().attempts) == (point == AFTER, 1, 1)


@pytest.mark.parametrize("step", [CLAIM, INSERT])
@pytest.mark.parametrize("moment", [just_before, just_after])
def test_a_connection_that_breaks_leaves_all_or_nothing(moment, step):
    def terminates():
        elsewhere(terminate, connection.connection.info.backend_pid)

    with moment(rf"\s*{step}", terminates), suppress(Exception):
        assert by_lock(paying)().status_code in (201, 503)
    connection.close()
    assert by_lock(paying)().status_code == 201
    assert (effects(), record().response_status) == (1, 201)


def test_an_error_after_a_claim_ends_its_transaction(monkeypatch):
    """What the thread writes next, without a key, is committed."""
    claim, claimed = LockClaimStore.claim, []

    def failing(*args):
        claimed.append(claim(*args))
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(LockClaimStore, "claim", failing)
        with pytest.raises(KeyError):
            by_lock(paying)()
    pay("without a key")
    assert elsewhere(effects, "without a key") == 1
    claimed.clear()
    assert by_lock(paying)().status_code == 201


def test_a_caller_does_not_take_its_own_request_for_another(other_thread):
    """The owner ends while it is asked about, and the same request is sent again."""
    op = operation()
    policy = Policy(mode=Atomic(claim="lock"), scope="public")
    owner = connection.copy()
    came = []

    def come():
        cursor.execute("ROLLBACK")
        came.append(other_thread(engine.claim, op, policy))

    with owner.cursor() as cursor:
        cursor.execute("BEGIN")
        # the locks of another request, and of the key
        cursor.execute(MEET, [1, op.id, op.id])
        with just_before(r"\s*SELECT EXISTS", come):
            outcome = engine.claim(op, policy.by_record)  # by waiting for a moment
    owner.close()
    assert came == [ASK_AGAIN]
    assert isinstance(outcome, Claimed)
