"""L13: a key undoes no write that the same request without it would have kept, unless a
retry is to run again.
"""

from __future__ import annotations

import pytest
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied
from django.db import transaction
from django.http import Http404, HttpResponse
from django.views import View

from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic, Policy
from testproject.models import LedgerEntry
from tests.support.callers import all_effects as effects
from tests.support.callers import effects as paid
from tests.support.callers import entry_point, pay, references
from tests.support.statements import sent_statements
from tests.support.views import book, own_dispatch

pytestmark = pytest.mark.usefixtures("atomic_requests", "client_sees_500")


def returns(status):
    return lambda: HttpResponse(status=status)


def raises(error):
    def act():
        raise error

    return act


def fails_within(error):
    def act():
        with transaction.atomic():
            LedgerEntry.objects.update(reference="undone")
            raise error

    return act


RELEASED = {
    **{f"returns {status}": returns(status) for status in (400, 401, 422, 429)},
    "raises Http404": raises(Http404()),
    "raises PermissionDenied": raises(PermissionDenied()),
    "raises BadRequest": raises(BadRequest()),
    "raises in an inner block": fails_within(Http404()),
}
STORED = {
    "returns 402": returns(402),
    "returns 409": returns(409),
    "returns 201": returns(201),
}


def function(act):
    def view(request):
        book(request)
        return act()

    return view


def class_based(act):
    class ClassBased(View):
        def post(self, request):
            return function(act)(request)

    return ClassBased.as_view()


ENTRY_POINTS = {
    "@idempotent on a function": lambda act: idempotent(function(act)),
    "@idempotent on a class": (
        lambda act: idempotent(class_based(act).view_class).as_view()
    ),
    "middleware, function": function,
    "middleware, class": class_based,
    "non_atomic_requests": lambda act: idempotent(
        transaction.non_atomic_requests(function(act))
    ),
}
BY_LOCK = pytest.param(
    lambda act: idempotent(mode=Atomic(claim="lock"))(function(act)),
    id="by lock",
    marks=pytest.mark.postgresql,
)


@pytest.mark.parametrize(
    "protected",
    [*(pytest.param(each, id=id) for id, each in ENTRY_POINTS.items()), BY_LOCK],
)
@pytest.mark.parametrize("act", (RELEASED | STORED).values(), ids=RELEASED | STORED)
def test_l13_a_plain_views_writes_stand_or_fall_as_without_a_key(call, protected, act):
    assert_neutral(call, protected(act))


def assert_neutral(call, view):
    plain = call(view, key=None)
    kept = set(references())
    count = effects()
    LedgerEntry.objects.all().delete()
    keyed = call(view)
    assert (keyed.status_code, effects()) == (plain.status_code, count)
    assert set(references()) == kept
    if plain.status_code in Policy().release_statuses:
        assert not IdempotencyRecord.objects.exists()
        assert "Idempotent-Replayed" not in call(view).headers


@pytest.mark.drf
@pytest.mark.parametrize("non_atomic", [False, True], ids=["", "non_atomic_requests"])
@pytest.mark.parametrize("by", ["mixin", "middleware"])
@pytest.mark.parametrize(
    "name",
    [
        "ValidationError",
        "NotFound",
        "Throttled",
        "Http404",
        "Conflict",
        "returned",
        "none",
    ],
)
def test_l13_drf_writes_stand_or_fall_as_without_a_key(call, by, name, non_atomic):
    assert_neutral(call, rest_framework_view(name, by, non_atomic))


def rest_framework_view(name, by, non_atomic):
    from rest_framework import exceptions
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    class Conflict(exceptions.APIException):
        status_code = 409

    raised = {"Conflict": Conflict, "Http404": Http404, "returned": None, "none": None}
    error = raised[name] if name in raised else getattr(exceptions, name)

    class Charges(*([IdempotentMixin] if by == "mixin" else []), APIView):
        authentication_classes = permission_classes = ()
        idempotency_policy = Policy(scope="public")

        def perform_authentication(self, request):
            request.user = request._request.user

        def post(self, request):
            book(request)
            if error is not None:
                raise error
            return Response({}, status=422 if name == "returned" else 201)

    if non_atomic:
        Charges.dispatch = transaction.non_atomic_requests(own_dispatch(Charges))
    return Charges.as_view()


@pytest.mark.drf
def test_l13_an_exception_handler_may_keep_the_writes(call, settings):
    settings.REST_FRAMEWORK = settings.REST_FRAMEWORK | {
        "EXCEPTION_HANDLER": f"{__name__}.keeping_handler"
    }
    assert_neutral(
        call, rest_framework_view("ValidationError", "mixin", non_atomic=False)
    )
    assert effects() == 2


def keeping_handler(error, context):
    from rest_framework.response import Response

    return Response({}, status=getattr(error, "status_code", 500))


@pytest.mark.parametrize("act", RELEASED.values(), ids=RELEASED)
def test_on_release_rollback_undoes_what_the_view_wrote(call, act):
    view = idempotent(mode=Atomic(on_release="rollback"))(function(act))
    call(view)
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)


@pytest.mark.parametrize("act", [returns(500), raises(LookupError()), returns(503)])
def test_a_response_that_a_retry_runs_again_is_rolled_back(call, act):
    call(idempotent(function(act)))
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == "failed"


@pytest.mark.postgresql
@pytest.mark.psycopg3
@pytest.mark.not_on_citus
def test_the_record_is_removed_in_the_transaction_of_the_writes(call):
    with sent_statements() as statements:
        call(idempotent(function(returns(422))))
    release, commit = statements.round_trips[-1]
    assert ("DELETE FROM django_idempotency_record" in release, commit) == (
        True,
        "COMMIT",
    )
    assert statements.transaction == ["BEGIN", "COMMIT"]
    assert statements.on('INSERT INTO "testproject')


def test_a_released_key_whose_claim_was_lost_commits_nothing(payer):
    def view(request):
        pay()
        IdempotencyRecord.objects.all().delete()
        return HttpResponse(status=422)

    with pytest.raises(ImproperlyConfigured, match="or changed the record"):
        entry_point(view)()
    assert paid() == 0


def test_exempt_views_are_left_alone(call):
    assert_neutral(call, idempotency_exempt(function(returns(422))))
