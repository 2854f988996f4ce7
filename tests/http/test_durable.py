"""A durable block can't be had inside a keyed run in atomic mode: a check says so where it shows, else the error."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.http import HttpResponse
from django.urls import path
from django.views import View

from django_idempotency.decorators import idempotent
from django_idempotency.policy import Keys
from tests.support.callers import effects, entry_point, pay, record
from tests.support.checks import ids_found


def durable(request):
    with transaction.atomic(durable=True):
        pay()
    return HttpResponse(status=201)


@pytest.mark.usefixtures("payer")
def test_a_durable_block_in_a_keyed_view_is_refused():
    with pytest.raises(RuntimeError, match="durable") as raised:
        entry_point(durable)()
    (note,) = raised.value.__notes__
    assert 'mode="lease"' in note
    assert (effects(), record().status) == (0, "failed")


@pytest.mark.usefixtures("payer")
def test_an_error_of_the_views_own_gets_no_note():
    def view(request):
        raise RuntimeError("asked for")

    with pytest.raises(RuntimeError) as raised:
        entry_point(view)()
    assert not hasattr(raised.value, "__notes__")


@transaction.atomic(durable=True)
def decorated(request):
    return HttpResponse()


class ClassBased(View):
    @transaction.atomic(durable=True)
    def post(self, request):
        return HttpResponse()


@pytest.mark.parametrize(
    ("view", "ids"),
    [
        (idempotent(decorated), ["E018"]),
        (idempotent(ClassBased).as_view(), ["E018"]),
        (idempotent(scope="public", keys=Keys(min_length=32))(decorated), ["E018"]),
        (idempotent(mode="lease")(decorated), []),
        (idempotent(transaction.atomic(lambda request: HttpResponse())), []),
    ],
)
def test_a_durable_decorator_below_the_entry_point_is_an_error(settings, view, ids):
    settings.ROOT_URLCONF = (path("view/", view),)
    assert ids_found(databases=()) == ids
