"""Ninja's OpenAPI document tells of each protected operation's key, responses and
rules.
"""

from __future__ import annotations

import json
import sys
import uuid

import pytest
from django.apps import apps
from django.urls import path
from ninja import NinjaAPI, Schema

from django_idempotency import body_field
from django_idempotency.http.placement import idempotent
from django_idempotency.values.policy import Key


@pytest.fixture
def api():
    return NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)


class Paid(Schema):
    amount: int


def pay(request, amount: int):
    """Pays."""


def operations(api):
    from openapi_spec_validator import validate  # takes seconds to be imported

    document = json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))
    validate(document)
    return document["paths"], document["components"]["schemas"]


def header(operation):
    return next(
        (each for each in operation["parameters"] if each["name"] == "Idempotency-Key"),
        None,
    )


@pytest.mark.parametrize("required", [True, False])
def test_a_protected_operation_tells_of_its_key(api, required):
    protect = idempotent(required=required, key=Key(pattern="[0-9]+", min_length=8))
    api.post("/pay", response={201: Paid})(protect(pay_here()))
    paths, schemas = operations(api)
    operation = paths["/pay"]["post"]
    found = header(operation)
    assert (found["in"], found["required"]) == ("header", required)
    assert found["schema"] == {
        "type": "string",
        "minLength": 8,
        "maxLength": 257,
        "pattern": '^(?="|.{1,255}$)"?(?:[0-9]+)"?$',
    }
    assert operation["responses"].keys() == {"201", "400", "409", "422", "503"}
    assert "Idempotent-Replayed" in operation["responses"]["201"]["headers"]
    assert operation["responses"]["409"]["headers"].keys() == {"Retry-After"}
    (content,) = operation["responses"]["409"]["content"].items()
    assert content == (
        "application/problem+json",
        {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}},
    )
    assert operation["description"].startswith(
        "Pays.\n\nIdempotency: a retry with the same key gets the first"
    )
    assert {"code", "retryable"} <= schemas["IdempotencyProblem"]["properties"].keys()


def test_an_operation_says_where_its_key_is(api):
    api.post("/pay")(idempotent(key=body_field("order.reference"))(pay_here()))
    api.post("/again", operation_id="again")(
        idempotent(key=lambda request: None)(pay_here())
    )
    paths, _schemas = operations(api)
    assert header(paths["/pay"]["post"]) is header(paths["/again"]["post"]) is None
    assert "in the field order.reference of" in paths["/pay"]["post"]["description"]
    assert "that the server finds" in paths["/again"]["post"]["description"]


def pay_here():
    """A function of its own: Ninja writes on it what operation it made of it."""

    def pay_once(request, amount: int):
        return pay(request, amount)

    pay_once.__doc__ = pay.__doc__
    return pay_once


def test_an_unprotected_operation_stays_as_it_is(api):
    api.post("/free", response={201: Paid})(pay_here())
    api.get("/paid", response=Paid, operation_id="paid")(idempotent(pay_here()))
    paths, schemas = operations(api)
    assert header(paths["/free"]["post"]) is header(paths["/paid"]["get"]) is None
    assert paths["/free"]["post"]["responses"].keys() == {"201"}
    assert "IdempotencyProblem" not in schemas


def test_the_projects_own_description_of_a_status_stays(api):
    own = {"responses": {409: {"description": "Ours."}}}
    api.post("/pay", response={201: Paid}, openapi_extra=own)(idempotent(pay_here()))
    responses = operations(api)[0]["/pay"]["post"]["responses"]
    assert responses["409"]["description"] == "Ours."


@pytest.fixture
def covered(api, settings):
    """The operations of ``api`` at ``/api/``, in a project with the middleware."""
    settings.MIDDLEWARE = ["django_idempotency.middleware.IdempotencyMiddleware"]

    def described():
        settings.ROOT_URLCONF = (path("api/", api.urls),)
        return operations(api)[0]

    return described


def test_a_covered_operation_is_described_as_a_protected_one(api, covered, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    api.post("/pay", response={201: Paid})(pay_here())
    api.post("/protected", response={201: Paid}, operation_id="protected")(
        idempotent(pay_here())
    )
    api.get("/paid", response=Paid, operation_id="paid")(pay_here())
    described = covered()
    pay_it, protected = (described[path]["post"] for path in ("/pay", "/protected"))
    told = ("parameters", "responses", "description")
    assert [pay_it[name] for name in told] == [protected[name] for name in told]
    assert header(pay_it)["required"]
    assert header(described["/paid"]["get"]) is None


def test_an_exempt_operation_is_not_described(api, covered, settings):
    settings.IDEMPOTENCY = {"EXEMPT_PATHS": ["^/api/hooks/"]}
    api.post("/pay")(pay_here())
    api.post("/hooks/paid", operation_id="hook")(pay_here())
    described = covered()
    assert header(described["/pay"]["post"]) is not None
    assert header(described["/hooks/paid"]["post"]) is None


def test_another_package_of_ninjas_name_does_not_matter(monkeypatch):
    for module in ("ninja.openapi.schema", "django_idempotency.contrib.openapi.ninja"):
        monkeypatch.setitem(sys.modules, module, None)
    apps.get_app_config("django_idempotency_openapi").ready()


def test_an_operation_that_defers_says_what_its_202_has(api):
    from django_idempotency.contrib.operations import defers

    api.post("/pay", response={201: Paid})(idempotent(defers(pay_here())))
    api.post("/now", response={201: Paid}, operation_id="now")(idempotent(pay_here()))
    paths = operations(api)[0]
    responses = paths["/pay"]["post"]["responses"]
    assert responses.keys() == {"201", "202", "400", "409", "422", "503"}
    headers = {"Location", "Retry-After", "Preference-Applied"}
    assert headers < responses["202"]["headers"].keys()
    assert "202" not in paths["/now"]["post"]["responses"]
