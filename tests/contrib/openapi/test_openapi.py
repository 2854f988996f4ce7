"""The OpenAPI document tells of each protected operation's key, responses and rules,
and none of our docstrings.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from django.test import override_settings
from django.urls import path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.validation import validate_schema
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet, ViewSet

from django_idempotency import body_field
from django_idempotency.contrib.openapi.published import key_schema
from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Fingerprint, Key, Limits, Policy
from testproject.serializers import PaymentSerializer

pytestmark = pytest.mark.drf


def document(view, **policy):
    """The operations of a view with ``policy`` at /payments/."""
    described = type(
        "PaymentViewSet", (view,), {"idempotency_policy": Policy(**policy)}
    )
    router = SimpleRouter()
    router.register("payments", described, basename="payment")
    schema = SchemaGenerator(patterns=router.urls).get_schema(request=None, public=True)
    validate_schema(schema)
    return schema


class Payments(IdempotentMixin, GenericViewSet):
    """Payments of a shop."""

    serializer_class = PaymentSerializer

    def list(self, request):
        return Response()

    def create(self, request):
        return Response()

    @action(
        detail=False,
        methods=["post"],
        idempotency_policy=Policy(required=True, fail_open=True),
    )
    def refund(self, request):
        return Response()


def header(operation):
    parameters = [
        each
        for each in operation.get("parameters", ())
        if each["name"] == "Idempotency-Key"
    ]
    return parameters[0] if parameters else None


@pytest.mark.parametrize("required", [True, False])
def test_the_key_is_a_header_required_as_the_policy_says(required):
    operation = document(Payments, required=required)["paths"]["/payments/"]["post"]
    found = header(operation)
    assert (found["in"], found.get("required", False)) == ("header", required)
    assert (found["schema"]["minLength"], found["schema"]["maxLength"]) == (1, 257)


def test_a_safe_method_ignores_the_key():
    operation = document(Payments)["paths"]["/payments/"]["get"]
    assert header(operation) is None
    assert "409" not in operation["responses"]


def test_responses_of_the_package_have_the_problem_schema():
    schema = document(Payments)
    responses = schema["paths"]["/payments/"]["post"]["responses"]
    assert responses.keys() == {"200", "201", "400", "409", "422", "503"} - {"200"}
    assert responses["400"]["content"].pop("application/json") == {"schema": {}}, (
        "a view's own"
    )
    assert responses["201"]["content"].pop("application/json"), (
        "else the response was not stored"
    )
    for status in ("201", "400", "409", "422", "503"):
        (content,) = responses[status]["content"].items()
        assert content == (
            "application/problem+json",
            {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}},
        )
    assert (
        {"Retry-After"}
        == responses["409"]["headers"].keys()
        == responses["503"]["headers"].keys()
    )
    assert {"code", "retryable", "safe_new_key"} <= schema["components"]["schemas"][
        "IdempotencyProblem"
    ]["properties"].keys()


def test_the_codes_of_each_response_are_described_by_the_policy_of_the_action():
    paths = document(Payments)["paths"]
    optional, required = (
        paths[path]["post"]["responses"] for path in ("/payments/", "/payments/refund/")
    )
    assert optional["409"]["description"].endswith(
        "Codes: idempotency_key_in_use, idempotency_key_on_hold."
    )
    assert optional["422"]["description"].endswith("Code: idempotency_key_reused.")
    told = [
        "idempotency_key_missing" in responses["400"]["description"]
        for responses in (optional, required)
    ]
    assert told == [False, True]
    assert "Idempotent-Replayed" in optional["201"]["headers"]


@pytest.mark.parametrize(
    ("policy", "status", "is_described"),
    [
        ({"fail_open": True}, "503", False),
        ({"may_replay": lambda request, record: True}, "403", True),
        ({"admit": Limits(new_keys=1)}, "429", True),
    ],
    ids=["fail_open", "may_replay", "admit"],
)
def test_a_response_is_described_where_the_policy_makes_it_possible(
    policy, status, is_described
):
    described = [
        document(Payments, **options)["paths"]["/payments/"]["post"]["responses"]
        for options in ({}, policy)
    ]
    assert [status in responses for responses in described] == [
        not is_described,
        is_described,
    ]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({}, "gets the first response for 1 day"),
        ({"retention": 7200}, "gets the first response for 2 hours"),
        ({"retention": 90}, "gets the first response for 90 seconds"),
        ({"retention": None}, "gets the first response for good."),
        (
            {"fingerprint": Fingerprint(exclude=["trace"])},
            "All of the body except trace is compared",
        ),
        (
            {"fingerprint": Fingerprint(only=["amount"])},
            "Of the body, amount are compared",
        ),
        ({}, "code response_not_stored"),
    ],
)
def test_the_rules_for_retries_are_published(policy, said):
    description = document(Payments, **policy)["paths"]["/payments/"]["post"][
        "description"
    ]
    assert "Payments of a shop." in description
    assert said in description


def test_the_pattern_and_length_of_keys_are_in_the_schema():
    keys = Key(pattern="[0-9]+|x", min_length=8)
    schema = header(document(Payments, key=keys)["paths"]["/payments/"]["post"])[
        "schema"
    ]
    assert schema["pattern"].endswith('"?(?:[0-9]+|x)"?$')
    assert schema["minLength"] == 8
    schema = header(
        document(Payments, key=replace(keys, strict=True))["paths"]["/payments/"][
            "post"
        ]
    )["schema"]
    assert (schema["pattern"], schema["minLength"]) == ('^"(?:[0-9]+|x)"$', 10)


@pytest.mark.parametrize("pattern", [None, "k+"])
@pytest.mark.parametrize(
    ("strict", "quote", "length", "fits"),
    [
        (False, "", 255, True),
        (False, "", 256, False),
        (False, '"', 255, True),
        (False, '"', 256, False),
        (True, '"', 255, True),
        (True, '"', 256, False),
    ],
)
def test_the_longest_key_fits_its_schema(pattern, strict, quote, length, fits):
    schema = key_schema(Policy(key=Key(pattern=pattern, strict=strict)))
    sent = quote + "k" * length + quote
    found = re.search(schema.get("pattern", ""), sent)
    assert (found is not None and len(sent) <= schema["maxLength"]) is fits


def test_a_key_elsewhere_is_described_by_its_place():
    paths = document(Payments, key=body_field("reference"))["paths"]
    operation = paths["/payments/"]["post"]
    assert header(operation) is None
    assert (
        "the same key, in the field reference of the body, gets"
        in (operation["description"])
    )
    named = document(Payments, key="X-Once")["paths"]["/payments/"]["post"]
    assert [each["name"] for each in named["parameters"]] == ["X-Once"]


def test_a_description_by_the_project_has_precedence():
    class Described(Payments):
        @extend_schema(
            description="Pays.",
            parameters=[
                OpenApiParameter(
                    "Idempotency-Key", location="header", description="Ours."
                )
            ],
            responses={
                201: PaymentSerializer,
                409: OpenApiResponse(description="Busy."),
            },
        )
        def create(self, request):
            return Response()

    operation = document(Described)["paths"]["/payments/"]["post"]
    assert header(operation)["description"] == "Ours."
    assert operation["responses"]["409"]["description"] == "Busy."
    assert operation["responses"].keys() == {"201", "400", "409", "422", "503"}
    assert operation["description"].startswith("Pays.\n\nIdempotency: a retry")


class Plain(APIView):
    serializer_class = PaymentSerializer

    def get(self, request):
        return Response()

    def post(self, request):
        return Response()

    @extend_schema(
        description="Puts.", request=PaymentSerializer, responses={204: None}
    )
    def put(self, request):
        return Response()


@extend_schema(request=PaymentSerializer, responses=PaymentSerializer)
@api_view(["POST"])
def plain(request):
    return Response()


def covered_operation(method="post", view=None, at="plain/"):
    """The operation of a view without an entry point."""
    schema = SchemaGenerator(patterns=[path(at, view or Plain.as_view())]).get_schema(
        request=None, public=True
    )
    validate_schema(schema)
    return schema["paths"][f"/{at}"][method]


def is_described(operation):
    described = [
        header(operation) is not None,
        *(status in operation["responses"] for status in ("409", "422")),
    ]
    assert len(set(described)) == 1
    return described[0]


@pytest.fixture
def middleware(settings):
    settings.MIDDLEWARE = ["django_idempotency.middleware.IdempotencyMiddleware"]


def test_without_the_middleware_a_view_stays_as_it_is(settings):
    settings.MIDDLEWARE = []
    assert not is_described(covered_operation())


@pytest.mark.usefixtures("middleware")
def test_a_view_that_the_middleware_covers_is_described(settings):
    settings.IDEMPOTENCY = {"RETENTION": 60, "REQUIRED": True, "METHODS": {"POST"}}
    operation = covered_operation()
    assert is_described(operation)
    assert header(operation)["required"]
    assert "for 1 minute" in operation["description"]
    assert not is_described(covered_operation("get"))
    assert not is_described(covered_operation("put"))


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize(
    ("method", "view"), [("put", None), ("post", plain)], ids=["method", "api_view"]
)
def test_a_covered_view_that_extends_its_schema_is_described(method, view):
    assert is_described(covered_operation(method, view))


@pytest.mark.usefixtures("middleware")
def test_an_exempt_view_is_not_described(settings):
    assert not is_described(covered_operation(view=idempotency_exempt(Plain.as_view())))
    settings.IDEMPOTENCY = {"EXEMPT_PATHS": ["^/hooks/"]}
    assert not is_described(covered_operation(at="hooks/plain/"))
    assert is_described(covered_operation())


@pytest.mark.usefixtures("middleware")
def test_an_entry_point_of_its_own_counts_before_the_middlewares(settings):
    settings.IDEMPOTENCY = {"RETENTION": 60}
    assert (
        "for 2 hours"
        in covered_operation(view=idempotent(retention=7200)(Plain.as_view()))[
            "description"
        ]
    )


def test_the_test_projects_document_is_valid(client, db):
    answer = client.get(
        "/api/schema/", headers={"Accept": "application/vnd.oai.openapi+json"}
    )
    assert answer.status_code == 200
    validate_schema(answer.json())
    paths = answer.json()["paths"]
    assert header(paths["/api/transfers/"]["post"])["required"]
    assert is_described(paths["/legacy/api/refunds/"]["post"])


class Mute(APIView):
    authentication_classes = permission_classes = ()
    serializer_class = None

    def post(self, request):
        return Response()


class MuteSet(ViewSet):
    authentication_classes = permission_classes = ()
    serializer_class = None

    def create(self, request):
        return Response()


class Told(Mute):
    """Pays a bill."""


@pytest.fixture
def without_middleware(settings):
    """The middleware would protect, and have described, what has no entry point."""
    settings.MIDDLEWARE = []


WAYS = {
    "mixin": lambda view: type(
        view.__name__, (IdempotentMixin, view), {"__doc__": view.__doc__}
    ),
    "decorator": idempotent,
}


def published(view, **actions):
    """The description in the browsable API and in OPTIONS, and the one in the OpenAPI
    document.
    """
    shown = view().get_view_description()
    served = view.as_view(actions) if actions else view.as_view()
    document = SchemaGenerator(patterns=[path("pay/", served)]).get_schema(
        request=None, public=True
    )
    return shown, document["paths"]["/pay/"]["post"].get("description", "")


@pytest.mark.usefixtures("without_middleware")
@pytest.mark.parametrize("protect", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("view", "actions"),
    [(Mute, {}), (MuteSet, {"post": "create"})],
    ids=["view", "viewset"],
)
def test_a_view_without_a_docstring_is_not_described(protect, view, actions):
    """But for the rules for retries, which are made of the policy for the OpenAPI
    document.
    """
    shown, documented = published(protect(view), **actions)
    assert (shown, published(view, **actions)) == ("", ("", ""))
    assert documented.startswith("Idempotency: a retry with the same key")


@pytest.mark.parametrize("protect", WAYS.values(), ids=WAYS)
def test_a_views_docstring_is_its_description(protect):
    shown, documented = published(protect(Told))
    assert shown == "Pays a bill."
    assert documented.startswith("Pays a bill.")


@pytest.mark.usefixtures("without_middleware")
def test_the_description_of_a_method_without_keys_is_left_alone():
    view = type(
        "Mute", (IdempotentMixin, Mute), {"idempotency_policy": Policy(methods=["PUT"])}
    )
    assert published(view) == published(Mute)


def test_under_the_middleware_options_answer_as_without(settings, client):
    settings.ROOT_URLCONF = (
        path("pay/", Mute.as_view()),
        path("told/", Told.as_view()),
    )
    kept = [
        each
        for each in settings.MIDDLEWARE
        if each != "django_idempotency.middleware.IdempotencyMiddleware"
    ]
    described = []
    for middleware in (
        kept,
        [*kept, f"{IdempotencyMiddleware.__module__}.IdempotencyMiddleware"],
    ):
        settings.MIDDLEWARE = middleware
        described.append(
            [
                client.options(f"/{name}/").json()["description"]
                for name in ("pay", "told")
            ]
        )
    assert described == [["", "Pays a bill."]] * 2


def test_the_receipt_is_described_and_named():
    from django_idempotency.contrib.operations.status import OperationStatus

    class Receipt(OperationStatus, APIView):
        pass

    view = Receipt.as_view()
    urls = [path("receipts/", view), path("receipts/<uuid:id>/", view)]
    with override_settings(ROOT_URLCONF=tuple(urls)):
        schema = SchemaGenerator(patterns=urls).get_schema(request=None, public=True)
        rules = document(Payments)["paths"]["/payments/"]["post"]["description"]
    validate_schema(schema)
    by_key, by_id = (each["get"] for each in schema["paths"].values())
    assert [each["name"] for each in by_key["parameters"]] == ["Idempotency-Key"]
    assert [each["name"] for each in by_id["parameters"]] == ["id"]
    shown = by_id["responses"]["200"]["content"]["application/json"]["schema"]
    assert "on_hold" in shown["properties"]["status"]["enum"]
    assert "GET /receipts/ with the same key" in rules
    assert "/receipts/" not in str(document(Payments)["paths"])


DEFERRED_HEADERS = {"Location", "Retry-After", "Preference-Applied"}


def test_a_view_that_defers_says_what_its_202_has():
    from django_idempotency.contrib.operations import defers
    from django_idempotency.contrib.operations.deferring import ACCEPTED

    class Imports(Payments):
        create = defers(lambda self, request: Response())

    paths = document(Imports)["paths"]
    responses = paths["/payments/"]["post"]["responses"]
    assert responses.keys() == {"201", "202", "400", "409", "422", "503"}
    headers = responses["202"]["headers"].keys()
    assert headers == {*DEFERRED_HEADERS, "Idempotent-Replayed"}
    assert "202" not in paths["/payments/refund/"]["post"]["responses"]
    assert "202" not in paths["/payments/"]["get"]["responses"]
    assert ACCEPTED["content"].keys() == {"application/json"}, "as it was"


@pytest.mark.usefixtures("middleware")
def test_a_function_that_defers_and_describes_its_202_itself():
    from django_idempotency.contrib.operations import defers

    own = OpenApiResponse(description="Later.", response=PaymentSerializer)
    described = extend_schema(request=PaymentSerializer, responses={202: own})
    responses = covered_operation(
        view=defers(described(api_view(["POST"])(lambda request: Response())))
    )["responses"]
    assert "200" not in responses
    assert responses["202"]["description"] == "Later."
    assert "$ref" in responses["202"]["content"]["application/json"]["schema"]
    assert responses["202"]["headers"].keys() > DEFERRED_HEADERS
