"""What a database that was restored from a backup does to the keys that came after the backup."""

from __future__ import annotations

import pytest
from django.http import HttpResponse

from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.support.callers import claim, effects, entry_point, is_replay, paying, shift

pytestmark = pytest.mark.usefixtures("payer")
MODELS = (IdempotencyRecord, LedgerEntry)


@pytest.fixture
def backup():
    """Keep all records and effects; what is returned puts these back, and nothing else."""

    def take():
        kept = {model: [dict(row) for row in model.objects.values()] for model in MODELS}

        def restore():
            for model in reversed(MODELS):
                model.objects.all().delete()
            for model, rows in kept.items():
                model.objects.bulk_create(model(**row) for row in rows)

        return restore

    return take


def test_a_key_that_had_its_response_is_replayed(backup):
    first = entry_point(paying)("k")
    restore = backup()
    restore()
    again = entry_point(paying)("k")
    assert (again.content, is_replay(again), effects()) == (first.content, True, 1)


def test_in_atomic_mode_a_later_key_is_unknown_and_its_effect_is_gone_with_it(backup):
    restore = backup()
    lost = entry_point(paying)("k")
    restore()
    assert effects() == 0
    again = entry_point(paying)("k")
    assert not is_replay(again)
    assert (again.content != lost.content, effects()) == (True, 1)


def test_in_atomic_mode_a_key_of_the_moment_is_taken_over_at_once(backup):
    claim("k", policy=Policy())
    shift("k", locked_at=-60)
    restore = backup()
    restore()
    assert (entry_point(paying)("k").status_code, effects()) == (201, 1)


def test_in_lease_mode_a_later_effect_outside_happens_again_with_the_same_child_key(backup):
    """Whoever is called downstream can tell, as long as it remembers that key."""
    sent = []

    def call_outside(request):
        sent.append(request.idempotency.child_key("charge"))
        return HttpResponse(status=201)

    restore = backup()
    entry_point(call_outside, mode="lease")("k")
    restore()
    assert not is_replay(entry_point(call_outside, mode="lease")("k"))
    assert len(sent) == 2
    assert len(set(sent)) == 1
