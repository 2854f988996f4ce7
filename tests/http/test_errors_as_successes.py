"""Interfaces that answer errors with 200, by an exception handler of REST framework or
by ``process_exception``.
"""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic
from testproject.models import LedgerEntry
from tests.support.callers import is_replay
from tests.support.views import api_class

MODULE = "tests.http.test_errors_as_successes"


class Refused(Exception):
    pass


class Answering:
    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        return self.get_response(request)

    def process_exception(self, request, exception):
        return HttpResponse('{"error": "refused"}')


def handler(error, context):
    """As in the documentation of REST framework, but for the status."""
    from rest_framework.response import Response
    from rest_framework.views import set_rollback

    set_rollback()
    return Response({"error": "refused"})


def refusing(request):
    user = User.objects.get(username="alice")
    LedgerEntry.objects.create(kind="order", user=user, amount=1, reference="r")
    raise Refused


def by_handler(**policy):
    api = api_class(refusing, get_exception_handler=lambda view: handler)
    return idempotent(**policy)(api).as_view()


def by_middleware(**policy):
    return idempotent(**policy)(refusing)


@pytest.mark.parametrize(
    "make",
    [pytest.param(by_handler, marks=pytest.mark.drf), by_middleware],
    ids=["exception handler", "process_exception"],
)
@pytest.mark.parametrize(
    "mode",
    [
        "atomic",
        pytest.param(Atomic(claim="lock"), marks=pytest.mark.postgresql),
        "lease",
    ],
    ids=["by record", "by lock", "lease"],
)
def test_a_response_whose_effects_were_undone_is_sent_and_not_stored(
    call, atomic_requests, make, mode
):
    call.settings.MIDDLEWARE = [*call.settings.MIDDLEWARE, f"{MODULE}.Answering"]
    view = make(scope="public", mode=mode)
    unkeyed = call(view, key=None)
    without_key = (unkeyed.status_code, unkeyed.content, LedgerEntry.objects.count())
    LedgerEntry.objects.all().delete()
    keyed = call(view)
    assert (
        keyed.status_code,
        keyed.content,
        LedgerEntry.objects.count(),
    ) == without_key
    assert without_key[2] == (0 if atomic_requests else 1)
    assert IdempotencyRecord.objects.exists() is not atomic_requests
    assert is_replay(call(view)) is not atomic_requests
