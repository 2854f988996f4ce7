"""A protected view that calls another: the same record passes through, another record
has an entry point of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Policy
from tests.support.callers import SCOPE, is_replay, operation, paying, post, record
from tests.support.views import Runs, api_class, code

pytestmark = pytest.mark.usefixtures("payer")

leased = idempotent(scope=SCOPE, mode="lease")
atomic = idempotent(scope=SCOPE)


@pytest.mark.parametrize("outer", [atomic, leased], ids=["atomic", "lease"])
@pytest.mark.parametrize("inner", [atomic, leased], ids=["in it atomic", "in it lease"])
def test_the_same_record_passes_through(outer, inner):
    runs = Runs()
    called = inner(runs.view)
    protected = outer(lambda request: called(request))
    answers = [protected(post()) for _ in range(2)]
    assert [answer.content for answer in answers] == [b"run 1", b"run 1"]
    assert ([is_replay(answer) for answer in answers], runs.count) == ([False, True], 1)
    assert runs.contexts[0].key == "k"


def test_an_error_inside_is_the_outer_views():
    def failing(request):
        raise LookupError

    with pytest.raises(LookupError):
        atomic(lambda request: atomic(failing)(request))(post())
    assert (record().status, record().attempts) == ("failed", 1)


def test_for_another_record_it_has_an_entry_point_of_its_own():
    runs = Runs()
    called = idempotent(scope=lambda request: "another", mode="lease")(runs.view)
    contexts = []

    def calling(request):
        before = request.idempotency
        response = called(request)
        contexts.append((before, request.idempotency))
        return HttpResponse(b"outer " + response.content)

    answers = [leased(calling)(post()) for _ in range(2)]
    assert [answer.content for answer in answers] == [b"outer run 1"] * 2
    assert set(IdempotencyRecord.objects.values_list("scope", flat=True)) == {
        SCOPE,
        "custom:another",
    }
    assert contexts[0][0] is contexts[0][1], "the outer view still sees its own"
    assert runs.contexts[0].scope == "custom:another"


def test_a_refusal_inside_is_never_the_stored_response():
    """The inner operation runs elsewhere; the outer one has not been done then."""
    policy = Policy(scope=lambda request: "another", mode="lease")
    engine.claim(replace(operation(), scope="custom:another"), policy)
    runs = Runs(lambda request: idempotent(policy=policy)(paying)(request))
    refused = leased(runs.view)(post())
    assert (refused.status_code, code(refused)) == (409, "idempotency_key_in_use")
    assert record().status == "failed"
    assert record().response_status is None
    IdempotencyRecord.objects.filter(scope="custom:another").delete()
    assert leased(runs.view)(post()).status_code == 201


def test_the_same_key_sent_anew_from_inside_is_a_duplicate():
    """Another request object is another request, whoever sends it."""
    refused = []

    def calling(request):
        refused.append(leased(paying)(post()))
        return HttpResponse()

    assert leased(calling)(post()).status_code == 200
    assert code(refused[0]) == "idempotency_key_in_use"


@pytest.mark.drf
@pytest.mark.parametrize("outer", [atomic, leased], ids=["atomic", "lease"])
def test_a_rest_framework_view_inside_passes_through(outer):
    from rest_framework.response import Response

    runs = Runs(lambda request: Response({"run": runs.count}))
    inner = outer(api_class(runs.view)).as_view()

    def calling(request):
        return inner(request)

    answers = [outer(calling)(post()) for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in answers] == [
        (200, b'{"run":1}')
    ] * 2
    assert runs.count == 1
