"""What a project publishes of its views is its own text: none of this package's docstrings is in it."""

from __future__ import annotations

import pytest
from django.urls import path
from drf_spectacular.generators import SchemaGenerator
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_idempotency.decorators import idempotent
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin

pytestmark = pytest.mark.drf


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
    "mixin": lambda view: type(view.__name__, (IdempotentMixin, view), {"__doc__": view.__doc__}),
    "decorator": idempotent,
}


def published(view, **actions):
    """The description in the browsable API and in OPTIONS, and the one in the OpenAPI document."""
    shown = view().get_view_description()
    served = view.as_view(actions) if actions else view.as_view()
    document = SchemaGenerator(patterns=[path("pay/", served)]).get_schema(request=None, public=True)
    return shown, document["paths"]["/pay/"]["post"].get("description", "")


@pytest.mark.usefixtures("without_middleware")
@pytest.mark.parametrize("protect", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("view", "actions"), [(Mute, {}), (MuteSet, {"post": "create"})], ids=["view", "viewset"])
def test_a_view_without_a_docstring_has_no_description(protect, view, actions):
    """But for the rules for retries, which are made of the policy for the OpenAPI document."""
    shown, documented = published(protect(view), **actions)
    assert (shown, published(view, **actions)) == ("", ("", ""))
    assert documented.startswith("Idempotency: a retry with the same key")


@pytest.mark.parametrize("protect", WAYS.values(), ids=WAYS)
def test_a_views_docstring_is_its_description(protect):
    shown, documented = published(protect(Told))
    assert shown == "Pays a bill."
    assert documented.startswith("Pays a bill.")


@pytest.mark.usefixtures("without_middleware")
def test_a_method_without_keys_has_no_added_description():
    view = type("Mute", (IdempotentMixin, Mute), {"idempotency_policy": Policy(methods=["PUT"])})
    assert published(view) == published(Mute)


def test_under_the_middleware_options_answer_as_without(settings, client):
    settings.ROOT_URLCONF = (path("pay/", Mute.as_view()), path("told/", Told.as_view()))
    kept = [each for each in settings.MIDDLEWARE if each != "django_idempotency.middleware.IdempotencyMiddleware"]
    described = []
    for middleware in (kept, [*kept, f"{IdempotencyMiddleware.__module__}.IdempotencyMiddleware"]):
        settings.MIDDLEWARE = middleware
        described.append([client.options(f"/{name}/").json()["description"] for name in ("pay", "told")])
    assert described == [["", "Pays a bill."]] * 2
