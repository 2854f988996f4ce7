"""A durable block can't be had inside a keyed run in atomic mode: the error says what to do."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.http import HttpResponse

from tests.support.callers import effects, entry_point, pay, record


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
