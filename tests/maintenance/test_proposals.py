"""Where a second operator is required, one operator alone decides nothing, whatever
they try.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from django.contrib.auth.models import Permission

from django_idempotency import signals
from django_idempotency.maintenance import history
from django_idempotency.maintenance.decisions import (
    Act,
    Refusal,
    allow_retry,
    fail,
    marked_failed,
    resolve,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from tests.maintenance.test_decisions import (
    ACTS,
    ENDING,
    RESPONSE,
    K,
    dead,
    done,
    on_hold,
    refused,
)
from tests.support.callers import heard, row

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture(autouse=True)
def two(settings):
    settings.IDEMPOTENCY = {"DECISIONS": ["second_operator"]}


@pytest.fixture
def operators(django_user_model):
    """Three who may decide."""
    users = [
        django_user_model.objects.create_user(name, is_staff=True)
        for name in ("alice", "bob", "carol")
    ]
    for user in users:
        user.user_permissions.set(
            Permission.objects.filter(codename__endswith="_idempotencyrecord")
        )
    return users


@pytest.mark.parametrize("act", ENDING)
def test_a_decision_needs_the_same_proposal_by_another_operator(act, operators):
    alice, bob, _carol = operators
    on_hold()
    before = row()
    with heard(signals.operator_decided) as sent:
        for _time in range(2):
            assert (
                refused(ACTS[act](by=alice, note="asked the bank")) == Refusal.PROPOSED
            )
        assert (row(), sent) == (before, [])
        done(ACTS[act](by=bob))
    assert [told["by"] for told in sent] == [bob]
    proposed = entries().filter(user_id=alice.pk).first()
    assert (proposed.object_id, proposed.change_message.endswith("asked the bank")) == (
        str(K),
        True,
    )


def entries():
    """Those of the log that is read."""
    return history.logs()[-1].entries(IdempotencyRecord)


OTHERS = {
    "another act": (partial(fail, K), partial(allow_retry, K)),
    "another act, the same response": (
        partial(fail, K),
        partial(resolve, K, marked_failed(410, "")),
    ),
    "another response": (
        partial(resolve, K, RESPONSE),
        partial(resolve, K, replace(RESPONSE, body=b"1")),
    ),
    "another status": (partial(fail, K, status=410), partial(fail, K, status=409)),
    "another detail": (
        partial(fail, K, detail="lost"),
        partial(fail, K, detail="found"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_decision_is_another_proposal(name, operators):
    alice, bob, carol = operators
    proposed, decided = OTHERS[name]
    on_hold()
    before = row()
    assert refused(proposed(by=alice)) == refused(decided(by=bob)) == Refusal.PROPOSED
    assert row() == before
    done(decided(by=carol))


def test_a_proposal_ends_when_something_happens_to_the_record(operators):
    alice, bob, carol = operators
    on_hold()
    refused(allow_retry(K, by=alice))
    IdempotencyRecord.objects.update(updated_at=ahead(-60))
    assert refused(allow_retry(K, by=bob)) == Refusal.PROPOSED
    entries().update(action_time=ahead(-60))
    IdempotencyRecord.objects.update(created_at=ahead(0))
    assert refused(allow_retry(K, by=carol)) == Refusal.PROPOSED, (
        "it is another life of the key"
    )


def test_a_proposal_ends_after_a_day(operators):
    alice, bob, carol = operators
    on_hold()
    IdempotencyRecord.objects.update(created_at=ahead(-2 * 86400))
    refused(allow_retry(K, by=alice))
    entries().update(
        action_time=entries().get().action_time - timedelta(days=1, seconds=1)
    )
    assert refused(allow_retry(K, by=bob)) == Refusal.PROPOSED
    done(allow_retry(K, by=carol))


@pytest.mark.parametrize("lost", ["permission", "account"])
def test_a_proposal_ends_with_the_right_to_make_it(lost, operators):
    alice, bob, _carol = operators
    on_hold()
    refused(allow_retry(K, by=alice))
    if lost == "permission":
        alice.user_permissions.clear()
    else:
        type(alice).objects.filter(pk=alice.pk).update(is_active=False)
    assert refused(allow_retry(K, by=bob)) == Refusal.PROPOSED


def test_a_note_does_not_turn_an_entry_into_a_proposal(operators):
    alice, bob, _carol = operators
    on_hold()
    refused(allow_retry(K, by=alice))
    text = entries().get().change_message
    entries().delete()
    refused(fail(K, by=alice, note=text))
    assert refused(allow_retry(K, by=bob)) == Refusal.PROPOSED


def test_a_proposal_is_known_by_a_whole_digest(operators):
    on_hold()
    refused(resolve(K, RESPONSE, by=operators[0]))
    assert re.match("Proposed [0-9a-f]{64}: ", entries().get().change_message), (
        "a shorter one can be met twice"
    )


@pytest.mark.parametrize("by", [None, "alice"])
def test_a_decision_without_a_user_is_refused(by):
    on_hold()
    assert refused(allow_retry(K, by=by)) == Refusal.NO_SECOND


@pytest.mark.usefixtures("no_history")
def test_without_a_history_nothing_is_decided(operators):
    on_hold()
    assert {refused(allow_retry(K, by=user)) for user in operators} == {
        Refusal.NO_SECOND
    }


def test_a_lease_is_extended_by_one(operators):
    dead()
    done(ACTS[Act.EXTEND](by=operators[0]))
