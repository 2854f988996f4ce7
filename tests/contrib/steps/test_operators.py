"""Steps go the way of their record, and operators see them."""

from __future__ import annotations

import base64
import json
from uuid import uuid4

import pytest

from django_idempotency import Body
from django_idempotency.admin.alarms import alarms
from django_idempotency.contrib import steps
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.operators import FAMILY, prune
from django_idempotency.instrumentation.metrics import samples
from django_idempotency.maintenance import cleanup
from django_idempotency.maintenance.advice import advice, timeline
from django_idempotency.maintenance.privacy import erase, export, reencrypt
from django_idempotency.maintenance.records import records
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RowLocked
from tests.contrib.steps.conftest import run
from tests.support.callers import SCOPE, record, shift, when
from tests.support.views_of_laws import HOUR

pytestmark = pytest.mark.postgresql
KEYS = [base64.b64encode(bytes([number]) * 32).decode() for number in range(2)]
SECRET = {"iban": "DE02"}


def reserve():
    return steps.atomic("reserve", lambda: SECRET)


def half_done(key="k", **policy):
    def work():
        reserve()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(work, key, **policy)


def left():
    return sorted(Step.objects.values_list("record_id", "name"))


def test_steps_are_cleaned_up_together_with_their_record():
    run(reserve)
    run(reserve, "kept")
    half_done("unfinished")
    shift(expires_at=-HOUR, purge_at=-HOUR)
    assert cleanup().done == {"deleted": 1}
    kept = IdempotencyRecord.objects.values_list("pk", flat=True)
    assert {id for id, _name in left()} == set(kept)
    assert len(left()) == 2


def test_steps_whose_record_is_gone_are_pruned():
    run(reserve)
    run(reserve, "alive")
    Step.objects.filter(record_id=record("k").pk).update(record_id=uuid4())
    run(reserve, "again")
    shift("again", expires_at=-HOUR)
    run(lambda: None, "again")
    prune("default")
    assert [id for id, _name in left()] == [record("alive").pk]


def test_steps_are_erased_together_with_their_record():
    run(reserve)
    run(reserve, "other")
    erase(key="k")
    assert [id for id, _name in left()] == [record("other").pk]
    erase(SCOPE, bodies=True)
    assert Step.objects.get().result is None


def test_an_erased_result_is_not_taken_for_a_step_that_was_not_done():
    half_done()
    erase(SCOPE, bodies=True)
    assert run(reserve)["code"] == "idempotency_key_on_hold"
    assert "was erased" in record().reason
    steps.resolve(record().pk, "reserve", SECRET)
    assert run(reserve) == SECRET


def test_an_erased_operation_that_is_done_in_part_is_put_on_hold():
    """Otherwise a retry would run as new, and do its steps again."""
    half_done()
    run(reserve, "done")
    for dry_run in (True, False):
        swept = erase(SCOPE, dry_run=dry_run)
        assert swept.done == {"erased": 1}
        assert swept.left == {"live": 0, "on_hold": 1, "busy": 0}
    assert run(reserve)["code"] == "idempotency_key_on_hold"
    kept = IdempotencyRecord.objects.get()
    assert (kept.path, bytes(kept.fingerprint)) == ("", b"")
    assert "data was erased" in kept.reason
    assert Step.objects.get().result is None
    assert erase(SCOPE, on_hold=True).done == {"erased": 1}
    assert not Step.objects.exists()


@pytest.mark.parametrize("encrypt", [False, True])
def test_steps_are_exported_and_their_results_with_the_bodies(settings, encrypt):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": KEYS[:1]}
    run(reserve, body=Body(encrypt=encrypt))
    (without,), (found,) = export(SCOPE), export(SCOPE, bodies=True)
    assert [step["name"] for step in without["steps"]] == ["reserve"]
    assert "DE02" not in json.dumps(without)
    assert found["steps"][0]["result"] == SECRET


def test_results_are_encrypted_anew(settings):
    """Also those of operations that are not finished."""
    known = {**settings.IDEMPOTENCY, "DIGEST_KEYS": KEYS[:1]}
    settings.IDEMPOTENCY = {**known, "ENCRYPTION_KEYS": KEYS[:1]}
    half_done(body=Body(encrypt=True))
    settings.IDEMPOTENCY = {**known, "ENCRYPTION_KEYS": KEYS[::-1]}
    reencrypt()
    settings.IDEMPOTENCY = {**known, "ENCRYPTION_KEYS": KEYS[1:]}
    assert run(lambda: [reserve(), "done"], body=Body(encrypt=True)) == [SECRET, "done"]


def test_a_result_is_bound_to_its_record_and_its_name(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": KEYS[:1]}
    half_done(body=Body(encrypt=True))
    Step.objects.update(name="other")
    assert run(lambda: steps.atomic("other", lambda: None), body=Body(encrypt=True))[
        "code"
    ] == ("idempotency_key_on_hold")


def test_the_timeline_of_a_record_shows_its_steps():
    def fax():
        raise ArithmeticError

    def work():
        reserve()
        steps.call("fax", fax, at_most_once=True)

    run(work)
    shown = records(None).annotate(now=DatabaseNow(), locked=RowLocked()).get()
    told = [str(event.what) for event in timeline(shown)]
    assert any(text.startswith("step reserve was done in attempt 1") for text in told)
    assert any(text.startswith("step fax began in attempt 1") for text in told)


def test_operations_that_stay_half_done_raise_an_alarm():
    half_done()
    shown = records(None).annotate(now=DatabaseNow(), locked=RowLocked()).get()
    assert "the record stays" in str(advice(shown).by_itself)
    assert alarms("default") == []
    shift(updated_at=-25 * HOUR)
    assert [alarm.text for alarm in alarms("default")] == [
        "1 done in part for more than a day"
    ]
    run(reserve)
    assert alarms("default") == []


def test_operations_that_wait_for_a_retry_or_an_operator_are_counted():
    half_done("younger")
    half_done("older")
    shift("older", updated_at=-HOUR)
    half_done("drift")
    run(lambda: steps.atomic("new:2", lambda: None), "drift")
    run(lambda: steps.call("fax:1", lambda: 1 / 0, at_most_once=True), "unknown")
    assert [(alarm.text, alarm.situation) for alarm in alarms("default")[1:]] == [
        ("1 on hold: the code changed", "on_hold"),
        ("1 on hold: a step’s outcome is unknown", "on_hold"),
    ]
    reading = {FAMILY: FAMILY.read("default")}
    found = {
        (gauge.name, *labels.values()): value
        for gauge in FAMILY.gauges
        for labels, value in samples(gauge, FAMILY, reading)
    }
    assert found.pop(("steps_unfinished_age", "default", "reserve")) >= HOUR
    assert found == {
        ("steps_unfinished", "default", "reserve"): 2,
        ("steps_on_hold", "default", "fax", "outcome_unknown"): 1,
        ("steps_on_hold", "default", "new", "code_changed"): 1,
    }


def test_steps_send_signals_and_are_counted_by_the_name_that_code_declares():
    told = []

    def note(sender, step, attempt, **named):
        told.append((sender, step, attempt, named.get("reason", "seconds" in named)))

    def work():
        steps.atomic("line:7", lambda: None)
        steps.call("fax", lambda: 1 / 0, at_most_once=True)

    with when(steps.step_completed, note), when(steps.step_held, note):
        run(work)
    assert told == [("line", "line:7", 1, True), ("fax", "fax", 1, record().reason)]
