"""Django REST framework's views of every kind with ``IdempotentMixin``, behind the
middleware, and decorated.
"""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import Permission
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.test.client import encode_multipart
from django.views.decorators.csrf import csrf_exempt
from rest_framework import (
    exceptions,
    generics,
    permissions,
    serializers,
    status,
    viewsets,
)
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import (
    action,
    api_view,
    authentication_classes,
    permission_classes,
)
from rest_framework.parsers import BaseParser, DataAndFiles, JSONParser, MultiPartParser
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView, exception_handler

from django_idempotency.http.key_sources import missing
from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.rest_framework import IdempotencyProblem, IdempotentMixin
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import (
    StoreUnavailable,
    TerminalFailure,
)
from django_idempotency.values.policy import Policy
from django_idempotency.values.problems import problem
from testproject.models import LedgerEntry
from tests.support.callers import effects, is_replay
from tests.support.views import Runs, book, class_with, code

pytestmark = pytest.mark.drf


class MayAdd(permissions.BasePermission):
    def has_permission(self, request, view):
        return request.user.has_perm("testproject.add_ledgerentry")


class EntrySerializer(serializers.ModelSerializer):
    class Meta:
        model = LedgerEntry
        fields = ("id", "amount", "currency", "reference")


class Plain(APIView):
    authentication_classes = [SessionAuthentication, TokenAuthentication]
    runs: Runs

    def post(self, request, *args, **kwargs):
        return self.runs.view(request)


class Generic(generics.CreateAPIView):
    queryset = LedgerEntry.objects.all()
    serializer_class = EntrySerializer
    authentication_classes = [SessionAuthentication]
    runs: Runs

    def perform_create(self, serializer):
        self.runs.contexts.append(self.request.idempotency)
        serializer.save(user=self.request.user, kind="order")


class Entries(viewsets.ModelViewSet, Generic):
    @action(
        detail=False,
        methods=["post"],
        idempotency_policy=Policy(required=True, mode="lease"),
    )
    def settle(self, request):
        self.runs.contexts.append(request.idempotency)
        return Response({"run": self.runs.count})


class Protected(IdempotentMixin, Plain):
    """The mixin on a plain view."""


def answering(make=None, base=Protected, **attributes):
    """The runs of a view that answers what ``make(request)`` does, and the view."""
    runs = Runs(
        make or (lambda request: Response({"entry": str(book(request).pk)}, status=201))
    )
    return runs, type("Answering", (base,), {"runs": runs} | attributes).as_view()


def counting(**attributes):
    """A view that answers how often it has run."""
    runs, view = answering(lambda request: Response({"run": runs.count}), **attributes)
    return view


def assert_runs_once(send):
    answers = [send() for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"run": 1}] * 2
    assert is_replay(answers[1])


def multipart(**fields):
    return {
        "data": encode_multipart("b", fields),
        "content_type": "multipart/form-data; boundary=b",
    }


PAYLOAD = {"amount": 5, "currency": "EUR", "reference": "r"}
VIEWS = {
    "APIView": (
        lambda runs, mixed: type("View", (*mixed, Plain), {"runs": runs}).as_view()
    ),
    "generic view": (
        lambda runs, mixed: type("View", (*mixed, Generic), {"runs": runs}).as_view()
    ),
    "viewset": (
        lambda runs, mixed: type("View", (*mixed, Entries), {"runs": runs}).as_view(
            {"post": "create"}
        )
    ),
    "action": (
        lambda runs, mixed: type("View", (*mixed, Entries), {"runs": runs}).as_view(
            {"post": "settle"}, **Entries.settle.kwargs if mixed else {}
        )
    ),
}


@pytest.mark.parametrize("mixed", [(IdempotentMixin,), ()], ids=["mixin", "middleware"])
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_runs_once_for_each_key(call, make, mixed):
    runs = Runs(lambda request: Response({"run": runs.count}))
    view = make(runs, mixed)
    answers = [call(view, PAYLOAD, key=key) for key in ("k", "k", "other")]
    assert [is_replay(answer) for answer in answers] == [False, True, False]
    assert answers[0].content == answers[1].content != answers[2].content
    assert [context.key for context in runs.contexts] == ["k", "other"]


def test_an_action_has_its_own_policy(call):
    runs = Runs()
    viewset = type("View", (IdempotentMixin, Entries), {"runs": runs})
    create, settle = (
        viewset.as_view({"post": "create"}),
        viewset.as_view({"post": "settle"}, **Entries.settle.kwargs),
    )
    assert call(create, PAYLOAD, key=None).status_code == 201
    assert code(call(settle, key=None)) == "idempotency_key_missing"
    assert call(settle, key="lease").status_code == 200
    assert IdempotencyRecord.objects.get().mode == "lease"


@pytest.mark.parametrize("send", ["__call__", "asgi"])
def test_the_middleware_covers_an_api_view_inside_its_permissions(call, alice, send):
    alice.user_permissions.add(Permission.objects.get(codename="add_ledgerentry"))
    runs = Runs(lambda request: Response({"run": runs.count}))
    view = api_view(["POST"])(
        permission_classes([MayAdd])(lambda request: runs.view(request))
    )
    view.cls.authentication_classes = [SessionAuthentication]
    answers = [getattr(call, send)(view) for _ in range(2)]
    assert ([answer.json() for answer in answers], is_replay(answers[1])) == (
        [{"run": 1}] * 2,
        True,
    )
    alice.user_permissions.clear()
    refused = getattr(call, send)(view)
    assert (refused.status_code, is_replay(refused), b"run" in refused.content) == (
        403,
        False,
        False,
    )


class Exempt(Entries):
    @idempotency_exempt
    def create(self, request):
        return self.runs.view(request)


EXEMPT = {
    "class": (
        lambda runs: idempotency_exempt(
            type("View", (Plain,), {"runs": runs})
        ).as_view()
    ),
    "action": (
        lambda runs: type("View", (Exempt,), {"runs": runs}).as_view({"post": "create"})
    ),
    "above api_view": lambda runs: idempotency_exempt(
        api_view(["POST"])(lambda request: runs.view(request))
    ),
    "below api_view": lambda runs: api_view(["POST"])(
        idempotency_exempt(lambda request: runs.view(request))
    ),
}


@pytest.mark.parametrize("make", EXEMPT.values(), ids=EXEMPT)
def test_the_middleware_leaves_an_exempt_view_alone(call, make):
    runs = Runs(lambda request: Response({"run": runs.count}))
    view = make(runs)
    view.cls.authentication_classes = [SessionAuthentication]
    assert [call(view).json() for _ in range(2)] == [{"run": 1}, {"run": 2}]


def test_a_method_that_is_not_allowed_leaves_the_key_free(call):
    _runs, view = answering()
    assert call(view, method="PUT").status_code == 405
    assert call(view).status_code == 201


def test_a_new_token_of_the_same_user_gets_the_same_response(call, alice):
    runs, view = answering(authentication_classes=[TokenAuthentication])
    for _ in range(2):
        token = Token.objects.create(user=alice)
        assert (
            call(view, headers={"Authorization": f"Token {token.key}"}).status_code
            == 201
        )
        token.delete()
    assert runs.count == 1


def test_a_callable_scope_sees_what_the_view_has_authenticated(call, alice):
    token = Token.objects.create(user=alice)
    policy = Policy(scope=lambda request: f"account:{request.auth.user_id}")
    runs, view = answering(
        authentication_classes=[TokenAuthentication], idempotency_policy=policy
    )
    call(view, headers={"Authorization": f"Token {token.key}"})
    assert runs.contexts[0].scope == f"custom:account:{alice.pk}"


def test_a_problem_is_problem_json_with_the_default_handler(call):
    _runs, view = answering(idempotency_policy=Policy(required=True))
    response = call(view, key=None)
    assert (response.status_code, response.headers["Content-Type"]) == (
        400,
        "application/problem+json",
    )
    assert response.json() == problem(missing(Policy())).members(None)
    assert (response.json()["type"], "Link" in response.headers) == (
        "about:blank",
        False,
    )


def test_a_projects_exception_handler_sees_problems(call, settings):
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": "https://example.com/problems/"}
    seen = []

    def handler(error, context):
        seen.append((error, error.get_codes(), error.status_code))
        response = exception_handler(error, context)
        response.data = {
            "errors": [{"code": error.get_codes(), "message": str(error.detail)}]
        }
        response.headers["Cache-Control"] = "private"
        return response

    _runs, view = answering(
        get_exception_handler=lambda view: handler,
        idempotency_policy=Policy(required=True),
    )
    response = call(view, key=None)
    assert (response.status_code, response.json()["errors"][0]["code"]) == (
        400,
        "idempotency_key_missing",
    )
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Link"].endswith('rel="describedby"')
    assert response.headers["Cache-Control"] == "private"
    assert call(view, PAYLOAD).status_code == 201
    assert call(view, {}).json()["errors"][0]["code"] == "idempotency_key_reused"
    assert [(codes, status) for _error, codes, status in seen] == [
        ("idempotency_key_missing", 400),
        ("idempotency_key_reused", 422),
    ]
    assert all(
        isinstance(error, IdempotencyProblem | exceptions.APIException)
        for error, _codes, _status in seen
    )


class Declined(exceptions.APIException):
    status_code = status.HTTP_402_PAYMENT_REQUIRED
    default_code = "declined"


class Broken(exceptions.APIException):
    status_code = status.HTTP_502_BAD_GATEWAY


STORED, RELEASED, FAILED = "stored", "released", "failed"


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (Declined(), 402, STORED),
        (exceptions.APIException("x"), 500, FAILED),
        (Broken(), 502, FAILED),
        (exceptions.ValidationError({"amount": ["too much"]}), 400, RELEASED),
        (exceptions.NotAuthenticated(), 403, RELEASED),
        (exceptions.PermissionDenied(), 403, RELEASED),
        (exceptions.NotFound(), 404, RELEASED),
        (exceptions.Throttled(3), 429, RELEASED),
    ],
)
@pytest.mark.parametrize("raised", [True, False])
def test_raised_and_returned_failures_follow_the_policy(
    call, error, status, outcome, raised
):
    def answer(request):
        book(request)
        if raised:
            raise error
        return Response({"detail": str(error.detail)}, status=status)

    runs, view = answering(answer)
    first, second = call(view), call(view)
    assert (first.status_code, second.status_code) == (status, status)
    assert (is_replay(second), runs.count) == (
        (True, 1) if outcome == STORED else (False, 2)
    )
    assert effects() == {STORED: 1, RELEASED: 2, FAILED: 0}[outcome], (
        "undone only where a retry is to run again"
    )
    kept = IdempotencyRecord.objects.first()
    assert (kept and kept.status) == {
        STORED: "failed",
        FAILED: "failed",
        RELEASED: None,
    }[outcome]


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_terminal_failure_is_stored_and_replayed(call, mode):
    def answer(request):
        book(request)
        raise TerminalFailure(Response({"declined": True}, status=409))

    runs, view = answering(answer, idempotency_policy=Policy(mode=mode))
    first, second = call(view), call(view)
    assert (first.status_code, second.content, is_replay(second), runs.count) == (
        409,
        first.content,
        True,
        1,
    )
    assert effects() == (0 if mode == "atomic" else 1)


@pytest.mark.parametrize(
    "entry_point", [Protected, idempotent(anonymous="ignore")(Plain)]
)
@pytest.mark.parametrize("why", ["no key", "switched off", "no scope"])
def test_a_terminal_failure_without_a_claim_is_the_response(
    call, alice, atomic_requests, entry_point, why
):
    def answer(request):
        request._request.user = alice
        book(request._request)
        raise TerminalFailure(Response({"declined": True}, status=402))

    call.settings.IDEMPOTENCY = {
        "ENABLED": why != "switched off",
        "ANONYMOUS": "ignore",
    }
    if why == "no scope":
        call.client.logout()
    _runs, view = answering(answer, entry_point, permission_classes=())
    response = call(view, key=None if why == "no key" else "k")
    assert (response.status_code, response.json()) == (402, {"declined": True})
    assert effects() == (0 if atomic_requests else 1)


class AsTheMethodSays(permissions.BasePermission):
    def has_permission(self, request, view):
        return getattr(view, request.method.lower()).is_open


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_permission_may_ask_what_is_set_on_the_method(call, key, is_open):
    def post(view, request):
        return Response()

    post.is_open = is_open
    view = type(
        "View",
        (IdempotentMixin, Plain),
        {"post": post, "permission_classes": [AsTheMethodSays]},
    )
    assert call(view.as_view(), key=key).status_code == (200 if is_open else 403)


def unhandled(request):
    book(request)
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (unhandled, ZeroDivisionError),
        (
            lambda request: Response({"entry": book(request), "odd": object()}),
            TypeError,
        ),
        (lambda request: book(request) and None, AssertionError),
    ],
    ids=["the view", "rendering", "no response"],
)
def test_an_exception_undoes_the_effects_and_passes(call, answer, error):
    runs, view = answering(answer)
    for _ in range(2):
        with pytest.raises(error):
            call(view)
    assert (runs.count, effects()) == (2, 0)


def test_a_transaction_that_the_view_has_marked_for_rollback_stays_marked(call):
    def give_up(request):
        book(request)
        transaction.set_rollback(True)
        raise exceptions.ValidationError

    _runs, view = answering(give_up)
    assert (call(view).status_code, effects()) == (400, 0)


def test_a_store_that_is_unavailable_inside_the_view_gets_a_problem(call):
    def ask_another_store(request):
        raise StoreUnavailable("away")

    runs, view = answering(ask_another_store)
    responses = [call(view) for _ in range(2)]
    assert [(each.status_code, code(each)) for each in responses] == [
        (503, "idempotency_store_unavailable")
    ] * 2
    assert runs.count == 2


@pytest.mark.parametrize(
    ("mode", "written", "answered"),
    [
        ("lease", [False], (409, "idempotency_key_in_use")),
        ("atomic", [], (503, "idempotency_store_unavailable")),
    ],
    ids=["the claim is lost", "the store is away"],
)
def test_a_run_that_comes_to_nothing_gets_a_problem(
    call, transactional_db, monkeypatch, mode, written, answered
):
    def complete(*_arguments, **_named):
        if not written:
            raise StoreUnavailable("away")
        return written[0]

    monkeypatch.setattr(type(store_for(Policy())), "complete", complete)
    runs = Runs(lambda request: Response())
    policy = Policy(mode=mode)
    response = call(
        type(
            "View",
            (IdempotentMixin, Plain),
            {"runs": runs, "idempotency_policy": policy},
        ).as_view()
    )
    assert (response.status_code, code(response), runs.count) == (*answered, 1)
    assert "Retry-After" in response.headers


def test_a_form_is_parsed_by_the_views_own_parsers_with_a_key_too(call, alice):
    class OnlyJSON(IdempotentMixin, APIView):
        authentication_classes = ()
        permission_classes = ()
        parser_classes = (JSONParser,)
        idempotency_policy = Policy(scope="public")

        def post(self, request):
            return Response(dict(request.data))

    form = multipart(a="1")
    assert call(OnlyJSON.as_view(), key=None, **form).status_code == 415
    assert call(OnlyJSON.as_view(), key="k", **form).status_code == 415
    assert not IdempotencyRecord.objects.exists()


def test_a_view_that_ignores_its_data_takes_a_form_that_it_can_not_parse(call):
    view, form = counting(parser_classes=[JSONParser]), multipart(a="1")
    assert call(view, key=None, **form).json() == {"run": 1}
    assert [call(view, **form).json() for _ in range(2)] == [{"run": 2}] * 2


class FromStream(BaseParser):
    """Reads the stream, as most parsers that are none of REST framework's do."""

    media_type = "application/json"

    def parse(self, stream, media_type=None, parser_context=None):
        return json.loads(stream.read())


class ReadsData(permissions.BasePermission):
    def has_permission(self, request, view):
        return bool(request.data)


def test_a_permission_may_read_the_data(call):
    view = counting(parser_classes=[FromStream], permission_classes=[ReadsData])
    assert_runs_once(lambda: call(view, PAYLOAD))
    assert code(call(view, PAYLOAD | {"amount": 6})) == "idempotency_key_reused"


def test_a_caller_without_a_scope_may_have_its_stream_read_by_a_middleware():
    ignoring = {
        "idempotency_policy": Policy(anonymous="ignore"),
        "permission_classes": [],
    }
    _runs, view = answering(lambda request: Response({}), **ignoring)
    request = APIRequestFactory().post(
        "/", PAYLOAD, format="json", headers={"Idempotency-Key": "k"}
    )
    request.read()
    assert view(request).status_code == 200


class Nested(MultiPartParser):
    """Makes objects of the fields, as parsers for nested serializers do."""

    def parse(self, stream, media_type=None, parser_context=None):
        parsed = super().parse(stream, media_type, parser_context)
        return DataAndFiles(
            {"order": {"lines": [parsed.data.dict() | parsed.files.dict()]}}, {}
        )


def test_a_parser_may_make_objects_of_a_form(call):
    view = counting(parser_classes=[Nested])

    def send(item="pen", content=b"a"):
        picture = SimpleUploadedFile("a.png", content)
        return call(view, **multipart(item=item, picture=picture))

    assert_runs_once(send)
    for other in (send("ink"), send(content=b"b")):
        assert code(other) == "idempotency_key_reused"


leased = idempotent(mode="lease")


class Orders(viewsets.ViewSet):
    authentication_classes = Plain.authentication_classes
    create = Plain.post


def function(runs):
    """An ``@api_view``, as projects write it."""
    order = permission_classes([permissions.IsAuthenticated])(
        lambda request: runs.view(request)
    )
    return api_view(["POST"])(
        authentication_classes(Plain.authentication_classes)(order)
    )


WAYS = {
    "class": lambda runs: leased(class_with(Plain, runs)).as_view(),
    "api_view": lambda runs: leased(csrf_exempt(function(runs))),
    "APIView.as_view()": lambda runs: csrf_exempt(
        leased(csrf_exempt(class_with(Plain, runs).as_view()))
    ),
    "ViewSet.as_view()": lambda runs: leased(
        class_with(Orders, runs).as_view({"post": "create"})
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_decorated_view_runs_once_for_each_key_behind_its_authentication(
    call, alice, way
):
    runs = Runs(lambda request: Response({"entry": str(book(request).pk)}))
    view = way(runs)
    call.client.logout()
    token = Token.objects.create(user=alice)
    header = {"Authorization": f"Token {token.key}"}
    answers = [call(view, key=key, headers=header) for key in ("k", "k", "other")]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [
        (200, False),
        (200, True),
        (200, False),
    ]
    assert answers[0].content == answers[1].content != answers[2].content
    assert [context.key for context in runs.contexts] == ["k", "other"]
    assert runs.contexts[0].scope.endswith(f":{alice.pk}")
    assert set(IdempotencyRecord.objects.values_list("mode", flat=True)) == {"lease"}, (
        "its own policy"
    )
    token.delete()
    refused = call(view, headers=header)
    assert (refused.status_code in (401, 403), b"entry" in refused.content) == (
        True,
        False,
    )
