"""Responses as a project's protocol wants them: refusals of its own, the key on every
response, and the path in the scope.
"""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models.functions import Now
from django.http import HttpResponse, JsonResponse

from django_idempotency import body_field, idempotent
from django_idempotency.maintenance import privacy
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.scopes import is_own, with_path
from tests.http.test_key_sources import ENTRY_POINTS
from tests.support.views import Runs

pytestmark = [pytest.mark.drf, pytest.mark.ninja]
BASE = "https://example.com/problems/"
BY_HEADER = {name: made for name, made in ENTRY_POINTS.items() if name != "form"}


def flat(problem, request):
    status = 418 if problem.code == "idempotency_key_reused" else problem.status
    error = {"own": problem.code, "path": request.path}
    return JsonResponse(error, status=status, headers={"X-Should-Retry": "perhaps"})


@pytest.fixture(params=BY_HEADER)
def protect(request, settings):
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": BASE}
    return lambda runs, **policy: BY_HEADER[request.param](
        runs, {"mode": "lease", "problems": flat} | policy
    )


@pytest.fixture
def own(call):
    """Calls a view, and returns code, status and headers of a refusal."""

    def refused(view, *args, **options):
        response = call(view, *args, **options)
        assert response.json().keys() == {"own", "path"}
        assert response.headers["X-Should-Retry"] == "perhaps"
        assert response.headers["Cache-Control"] == "no-store"
        assert BASE in response.headers["Link"]
        return response.json()["own"], response.status_code, response.headers

    return refused


def test_every_refusal_is_made_by_the_policys_callable(call, own, protect):
    runs = Runs()
    view = protect(runs, required=True)
    assert call(view, {"a": 1}).content == b"run 1"
    assert own(view, {"a": 2})[:2] == ("idempotency_key_reused", 418)
    assert own(view, {"a": 1}, key=None)[:2] == ("idempotency_key_missing", 400)
    assert own(view, {"a": 1}, key="a,b")[:2] == ("idempotency_key_malformed", 400)
    assert call(view, {"a": 1}).content == b"run 1", "a replay is no refusal"


def test_a_request_in_flight_is_refused_with_retry_after(call, own, protect):
    view = protect(Runs())
    call(view)
    IdempotencyRecord.objects.update(  # as if another process ran it again
        status=Status.PROCESSING,
        token=uuid.uuid4(),
        locked_at=Now(),
        locked_until=Now() + timedelta(minutes=1),
        response_status=None,
        response_headers=None,
        response_body=None,
    )
    code, status, headers = own(view)
    assert (code, status) == ("idempotency_key_in_use", 409)
    assert int(headers["Retry-After"]) > 0


@pytest.mark.parametrize("protect", sorted({*BY_HEADER} - {"async"}), indirect=True)
def test_the_response_of_a_lost_claim_is_refused_likewise(own, protect):
    def losing(request):
        IdempotencyRecord.objects.update(token=uuid.uuid4())
        return HttpResponse()

    assert own(protect(Runs(losing)))[:2] == ("idempotency_key_in_use", 409)


def test_an_outer_entry_point_does_not_store_a_refusal_inside(call):
    inner = idempotent(required=True, problems=flat, key="X-Inner")(Runs().view)
    outer = Runs(inner)
    view = idempotent(release_statuses=())(outer.view)
    for _time in range(2):
        assert call(view).json()["own"] == "idempotency_key_missing"
    assert outer.count == 2


def test_a_callable_that_returns_something_else_is_an_error(call):
    view = idempotent(required=True, problems=lambda problem, request: {})(Runs().view)
    with pytest.raises(ImproperlyConfigured, match="returned dict"):
        call(view, key=None)


def test_the_key_is_on_every_response(call, protect):
    runs = Runs(
        lambda request: HttpResponse(status=400 if b"bad" in request.body else 200)
    )
    view = protect(runs, echo_key=True, required=True)
    sent = [({"a": 1}, '"k"'), ({"a": 1}, "k"), ({"a": 2}, "k"), ({"bad": 1}, "b")]
    responses = [call(view, payload, key=key) for payload, key in sent]
    assert [it.status_code for it in responses] == [200, 200, 418, 400]
    assert [it.headers["Idempotency-Key"] for it in responses] == ['"k"', "k", "k", "b"]
    assert "Idempotency-Key" not in call(view, key=None).headers
    assert "Idempotency-Key" not in call(protect(Runs())).headers


def test_a_key_from_elsewhere_is_echoed_in_the_usual_header(call):
    view = idempotent(key=body_field("r"), echo_key=True)(Runs().view)
    responses = [call(view, {"r": "k", "a": a}, key="other") for a in (1, 1, 2)]
    assert [it.headers["Idempotency-Key"] for it in responses] == ["k"] * 3
    assert "Idempotency-Key" not in call(view, {"a": 1}, key="other").headers
    named = idempotent(key="X-Once", echo_key=True)(Runs().view)
    assert call(named, headers={"X-Once": "k"}).headers["X-Once"] == "k"


def test_the_same_key_at_another_path_is_another_operation(call, protect, alice):
    runs = Runs()
    view = protect(runs, scope_path=True, scope=lambda request: "a")
    paths = ["/view/", "/view/1/", "/view/", "/view/?a=1"]
    assert [call(view, path=path).status_code for path in paths[:3]] == [200] * 3
    assert call(view, path=paths[3]).status_code == 418, "the query is compared"
    assert runs.count == 2
    scopes = {"custom:a /view/", "custom:a /view/1/"}
    assert set(IdempotencyRecord.objects.values_list("scope", flat=True)) == scopes
    privacy.erase("custom:")
    privacy.erase("custom:a /view/1/")
    assert IdempotencyRecord.objects.get().scope == "custom:a /view/"
    privacy.erase("custom:a")
    assert not IdempotencyRecord.objects.exists()


def test_the_path_in_a_scope_never_makes_it_that_of_another_caller(alice):
    assert with_path("a", "/x /y") != with_path("a /x", "/y")
    assert is_own(with_path(f"auth.user:{alice.pk}", "/x/y"), alice)
    assert is_own(with_path(f"acme/auth.user:{alice.pk}", "/x/y"), alice)
    assert not is_own(with_path(f"auth.user:{alice.pk}0", "/x/y"), alice)
