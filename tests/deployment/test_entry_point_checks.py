"""E030 to E032: an entry point in a place where it protects nothing, or fails at the first request."""

from __future__ import annotations

import pytest
from django.http import HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import action, api_view, permission_classes
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_idempotency.checks.entry_points import check_entry_points
from django_idempotency.decorators import idempotent
from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin

pytestmark = pytest.mark.drf
on_post = method_decorator(idempotent, name="post")
on_dispatch = method_decorator(idempotent, name="dispatch")


def answer(request):
    return HttpResponse()


class Plain(View):
    def post(self, request):
        return HttpResponse()


class Api(APIView):
    permission_classes = ()

    def post(self, request):
        return Response()


class Charges(IdempotentMixin, ViewSet):
    def create(self, request):
        return Response()

    @action(detail=False, methods=["post"], idempotency_policy=Policy(required=True))
    def refund(self, request):
        return Response()


class Policed(Api):
    idempotency_policy = Policy(required=True)


class PolicedPlain(Plain):
    idempotency_policy = Policy(required=True)


def routed(viewset):
    router = SimpleRouter()
    router.register("charges", viewset, basename="charge")
    return router.urls


@pytest.fixture
def found(settings):
    """The errors of a project with these views, by id, with what each is about."""

    def run(*views, routes=()):
        settings.ROOT_URLCONF = (*(path(f"{number}/", view) for number, view in enumerate(views)), *routes)
        return [(error.id.rpartition(".")[2], error.msg, error.hint) for error in check_entry_points(None)]

    return run


INSIDE = {
    "below api_view": lambda: api_view(["POST"])(idempotent(answer)),
    "below other decorators": lambda: api_view(["POST"])(permission_classes([])(idempotent(answer))),
    "on the method of an APIView": lambda: on_post(type("Charge", (Api,), {})).as_view(),
}


@pytest.mark.parametrize("make", INSIDE.values(), ids=INSIDE)
def test_e030_an_entry_point_inside_rest_framework(found, make):
    ((id, message, hint),) = found(make())
    assert (id, "post: @idempotent is applied inside REST framework" in message) == ("E030", True)
    assert "above @api_view" in hint
    assert "IdempotentMixin" in hint


@pytest.mark.parametrize("view", [Policed, PolicedPlain])
def test_e031_a_policy_that_nothing_reads(found, view):
    ((id, message, hint),) = found(view.as_view())
    assert (id, message.split()[0].endswith(view.__name__)) == ("E031", True)
    assert "IdempotentMixin" in hint


TWICE = {
    "class and method": lambda: on_post(idempotent(type("Charge", (Plain,), {}))),
    "class and dispatch": lambda: on_dispatch(idempotent(type("Charge", (Plain,), {}))),
    "mixin and dispatch": lambda: on_dispatch(type("Charge", (IdempotentMixin, Api), {})),
    "method of a subclass": lambda: on_post(type("Charge", (idempotent(Plain),), {"post": Plain.post})),
}


@pytest.mark.parametrize("make", TWICE.values(), ids=TWICE)
def test_e032_two_entry_points_for_one_request(found, make):
    ((id, message, hint),) = found(make().as_view())
    assert (id, "has two entry points" in message, hint) == ("E032", True, "Keep only one.")


def test_a_class_is_reported_once_however_many_routes_it_has(found):
    view = Policed.as_view()
    assert [id for id, *_said in found(view, view)] == ["E031"]


def test_entry_points_in_their_places_are_not_reported(found):
    views = [
        idempotent(answer),
        idempotent(api_view(["POST"])(answer)),
        idempotent(Policed).as_view(),
        idempotent(PolicedPlain).as_view(),
        on_post(type("Charge", (Plain,), {})).as_view(),
        type("Charge", (IdempotentMixin, Api), {"idempotency_policy": Policy(required=True)}).as_view(),
        Plain.as_view(),
        Api.as_view(),
    ]
    assert found(*views, routes=routed(Charges)) == []
