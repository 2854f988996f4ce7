"""The OpenAPI document tells of each protected operation's key, responses and rules."""

from __future__ import annotations

import pytest

pytest.importorskip("drf_spectacular")

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin
from testproject.serializers import PaymentSerializer

pytestmark = pytest.mark.drf


def document(view, **policy):
    """The operations of a view with ``policy`` at /payments/."""
    described = type("PaymentViewSet", (view,), {"idempotency_policy": Policy(**policy)})
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

    @action(detail=False, methods=["post"], idempotency_policy=Policy(required=True, fail_open=True))
    def refund(self, request):
        return Response()


def header(operation):
    parameters = [each for each in operation.get("parameters", ()) if each["name"] == "Idempotency-Key"]
    return parameters[0] if parameters else None


@pytest.mark.parametrize("required", [True, False])
def test_the_key_is_a_header_required_as_the_policy_says(required):
    operation = document(Payments, required=required)["paths"]["/payments/"]["post"]
    found = header(operation)
    assert (found["in"], found.get("required", False)) == ("header", required)
    assert (found["schema"]["minLength"], found["schema"]["maxLength"]) == (1, 255)


def test_a_safe_method_takes_no_key():
    operation = document(Payments)["paths"]["/payments/"]["get"]
    assert header(operation) is None
    assert "409" not in operation["responses"]


def test_our_responses_have_the_problem_document():
    schema = document(Payments)
    responses = schema["paths"]["/payments/"]["post"]["responses"]
    assert responses.keys() == {"200", "201", "400", "409", "422", "503"} - {"200"}
    for status in ("400", "409", "422", "503"):
        (content,) = responses[status]["content"].items()
        assert content == ("application/problem+json", {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}})
    assert {"Retry-After"} == responses["409"]["headers"].keys() == responses["503"]["headers"].keys()
    assert {"code", "retryable", "safe_new_key"} <= schema["components"]["schemas"]["IdempotencyProblem"][
        "properties"
    ].keys()


def test_the_codes_that_an_operation_can_answer_are_told():
    paths = document(Payments)["paths"]
    optional, required = (paths[path]["post"]["responses"] for path in ("/payments/", "/payments/refund/"))
    assert optional["409"]["description"].endswith("Codes: idempotency_key_in_use, idempotency_key_on_hold.")
    assert optional["422"]["description"].endswith("Code: idempotency_key_reused.")
    told = ["idempotency_key_missing" in responses["400"]["description"] for responses in (optional, required)]
    assert told == [False, True]
    assert "request_time_malformed" not in optional["400"]["description"]


def test_a_replay_is_marked():
    responses = document(Payments)["paths"]["/payments/"]["post"]["responses"]
    assert "Idempotent-Replayed" in responses["201"]["headers"]


def test_a_policy_that_runs_unprotected_never_answers_503():
    responses = document(Payments)["paths"]["/payments/refund/"]["post"]["responses"]
    assert "503" not in responses


def test_an_action_is_described_by_its_own_policy():
    paths = document(Payments)["paths"]
    assert header(paths["/payments/refund/"]["post"])["required"]
    assert not header(paths["/payments/"]["post"]).get("required", False)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({}, "gets the first response for 1 day"),
        ({"retention": 7200}, "gets the first response for 2 hours"),
        ({"retention": 90}, "gets the first response for 90 seconds"),
        ({"fingerprint_exclude": ["trace"]}, "All of the body but trace is compared"),
        ({"fingerprint_fields": ["amount"]}, "Of the body, amount are compared"),
    ],
)
def test_the_rules_for_retries_are_published(policy, said):
    description = document(Payments, **policy)["paths"]["/payments/"]["post"]["description"]
    assert "Payments of a shop." in description
    assert said in description


def test_a_request_that_is_too_old_is_described_where_it_is_refused():
    responses = document(Payments, max_request_age=60)["paths"]["/payments/"]["post"]["responses"]
    assert "410" in responses


def test_what_keys_must_be_like_is_published():
    policy = {"key_pattern": "[0-9]+|x", "min_key_length": 8}
    schema = header(document(Payments, **policy)["paths"]["/payments/"]["post"])["schema"]
    assert (schema["pattern"], schema["minLength"]) == ("^(?:[0-9]+|x)$", 8)


def test_a_forbidden_replay_is_described_where_it_can_happen():
    given = {"may_replay": lambda request, record: True}
    described = [document(Payments, **policy)["paths"]["/payments/"]["post"]["responses"] for policy in ({}, given)]
    assert ["403" in responses for responses in described] == [False, True]


def test_that_new_keys_are_limited_is_described():
    given = {"max_new_keys": 1}
    described = [document(Payments, **policy)["paths"]["/payments/"]["post"]["responses"] for policy in ({}, given)]
    assert ["429" in responses for responses in described] == [False, True]


def test_a_view_without_the_mixin_stays_as_it_is():
    class Plain(APIView):
        serializer_class = PaymentSerializer

        def post(self, request):
            return Response()

    from django.urls import path

    schema = SchemaGenerator(patterns=[path("plain/", Plain.as_view())]).get_schema(request=None, public=True)
    operation = schema["paths"]["/plain/"]["post"]
    assert header(operation) is None
    assert "409" not in operation["responses"]


def test_the_test_projects_document_is_valid(client, db):
    answer = client.get("/api/schema/", headers={"Accept": "application/vnd.oai.openapi+json"})
    assert answer.status_code == 200
    validate_schema(answer.json())
    assert header(answer.json()["paths"]["/api/transfers/"]["post"])["required"]
