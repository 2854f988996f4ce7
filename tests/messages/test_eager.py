"""Celery's eager tasks inside a keyed view: they are a part of its operation, not one
of their own.
"""

from __future__ import annotations

import pytest
from celery import Celery, shared_task
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse

from django_idempotency.messages.celery import idempotent_task
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Policy
from tests.support.callers import effects, entry_point, pay, record

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def task():
    app = Celery("tests", set_as_current=False)
    app.conf.task_always_eager = app.conf.task_eager_propagates = True

    @app.task(name="tests.pay", shared=False)
    @idempotent_task
    def charge(reference):
        return str(pay(reference).pk)

    return charge


@pytest.mark.parametrize(("mode", "records"), [("atomic", 1), ("lease", 2)])
def test_an_eager_task_is_part_of_an_atomic_view_and_has_a_record_in_a_lease_view(
    task, mode, records
):
    def view(request):
        task.delay("eager")
        return HttpResponse(status=201)

    send = entry_point(view, mode=mode)
    assert send().status_code == 201
    assert send().headers["Idempotent-Replayed"] == "true"
    assert (effects("eager"), IdempotencyRecord.objects.count()) == (1, records)


def test_the_effect_of_an_eager_task_is_undone_with_the_view(task):
    def view(request):
        task.delay("eager")
        return HttpResponse(status=500)

    assert entry_point(view)().status_code == 500
    assert (effects("eager"), record().status) == (0, "failed")


def test_the_same_order_of_another_tenant_is_another_task(enter_tenant):
    app = Celery("tests", set_as_current=False)

    @app.task(name="tests.pay", shared=False)
    @idempotent_task(key="order-{order}", retention=None)
    def charge(order):
        return str(pay("eager").pk)

    results = []
    for schema in ("acme", "other", "acme"):
        enter_tenant(schema)
        results.append(charge.apply([7]).get())
    assert results[0] == results[2] != results[1]


class Frame:
    """Like a data frame of pandas: a comparison has no truth value."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("ambiguous")

    def __repr__(self):
        return "Frame"


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "argument",
    ["eager", {("EUR", 1): 5}, Frame(), CIRCLE],
    ids=["text", "keys", "no truth value", "circle"],
)
def test_a_task_outside_transactions_runs_once_with_arguments_unfit_for_json(
    argument,
):
    app = Celery("tests", set_as_current=False)

    @app.task(name="tests.pay", shared=False)
    @idempotent_task
    def charge(argument):
        return str(pay("eager").pk)

    assert (
        charge.apply([argument], task_id="1").get()
        == charge.apply([argument], task_id="1").get()
    )
    assert effects("eager") == 1


def test_the_decorator_above_shared_task_is_refused():
    def charge():
        raise AssertionError("it ran")

    with pytest.raises(
        ImproperlyConfigured, match="Put @idempotent_task below @shared_task"
    ):
        idempotent_task(shared_task(name="tests.above")(charge))
    with (
        Celery(set_as_current=False) as app,
        pytest.raises(ImproperlyConfigured, match="below @shared_task"),
    ):
        idempotent_task(policy=Policy())(app.task(name="above")(charge))
