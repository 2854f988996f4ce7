from __future__ import annotations

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.utils.decorators import method_decorator
from django.views.generic import CreateView
from rest_framework.decorators import action, api_view, permission_classes
from rest_framework.permissions import AllowAny, IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_idempotency.decorators import idempotent
from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.webhooks import WebhookView
from tests.deployment.wrong import Given, Page, aview, table, view, wrong

POLICY = Policy(required=True)
on_post = method_decorator(idempotent, name="post")
on_dispatch = method_decorator(idempotent, name="dispatch")


class Revisions:
    """django-reversion's middleware, as far as it shows in a project."""

    atomic = True
    __module__ = "reversion.middleware"

    def __init__(self, get_response):
        self.get_response = get_response


class RevisionsApart(Revisions):
    atomic = False


class Adding(CreateView):
    model = User
    fields = ("username",)


class AsyncPage(Page):
    async def post(self, request):
        return HttpResponse()


class Policed(Page):
    idempotency_policy = POLICY


class Policies(Page):
    policy = POLICY


class Unused(Page):
    def dispatch(self, request, *args, **kwargs):
        return HttpResponse()


class Api(APIView):
    permission_classes = ()

    def post(self, request):
        return Response()


class Charges(IdempotentMixin, ViewSet):
    permission_classes = (IsAuthenticated,)

    def create(self, request):
        return Response()

    @action(detail=False, methods=["post"], idempotency_policy=POLICY)
    def refund(self, request):
        return Response()


class Hook(WebhookView):
    """It does read ``policy``."""

    source, verify, handle, policy = "s", repr, print, Policies.policy


class HasAPIKey(IsAuthenticated):
    """As in djangorestframework-api-key."""


def new(*bases, **attributes):
    """A class of its own, because decorators leave marks."""
    return type(bases[0].__name__, bases, attributes)


def protected(*permissions, policy=(), **attributes):
    api = new(APIView, **{"permission_classes": permissions} | attributes)
    return idempotent(**dict(policy))(api).as_view()


def middleware(*paths):
    return Given(MIDDLEWARE=[*paths])


HERE = __name__
IN_ORDER = Given(
    idempotent(api_view(["POST"])(view)),
    idempotent(new(Api, idempotency_policy=POLICY)).as_view(),
    idempotent(Policed).as_view(),
    idempotent(new(Page, idempotency_policy=POLICY)).as_view(),
    on_post(new(Page)).as_view(),
    new(IdempotentMixin, Api, idempotency_policy=POLICY).as_view(),
    Charges.as_view({"post": "create"}),
    Charges.as_view({"post": "refund"}),
    Page.as_view(),
    Hook.as_view(),
)
INSIDE = "post: @idempotent is applied inside REST framework"

table(
    (
        "E013",
        middleware(f"{HERE}.Revisions"),
        middleware(f"{HERE}.RevisionsApart"),
        "wrong.views.Revisions opens a transaction around every view, in which no key can be claimed",
    ),
    ("E014", Given(api_view(["POST"])(idempotent(view))), IN_ORDER, INSIDE),
    ("E014", Given(api_view(["POST"])(permission_classes([])(idempotent(view)))), IN_ORDER, INSIDE),
    ("E014", Given(on_post(new(Api)).as_view()), IN_ORDER, INSIDE),
    ("E015", Given(Policed.as_view()), IN_ORDER, "Policed sets an idempotency_policy, but has no entry point"),
    ("E015", Given(new(Api, idempotency_policy=POLICY).as_view()), IN_ORDER, "Api sets an idempotency_policy"),
    (
        "E015",
        Given(Policies.as_view()),
        IN_ORDER,
        "Policies has a policy in its attribute policy, which",
    ),
    ("E014", Given(on_dispatch(new(IdempotentMixin, Api)).as_view()), IN_ORDER, "dispatch: @idempotent is applied"),
    (
        "E017",
        Given(idempotent(aview)),
        Given(idempotent(aview), MODE="lease"),
        "wrong.aview is an async view in atomic",
    ),
    (
        "E017",
        Given(idempotent(AsyncPage).as_view()),
        Given(idempotent(mode="lease")(AsyncPage).as_view()),
        "wrong.views.AsyncPage is an async view in atomic mode.",
    ),
    (
        "W020",
        Given(protected(AllowAny), protected()),
        Given(
            protected(AllowAny, policy={"scope": "public"}),
            protected(AllowAny, policy={"anonymous": "ignore"}),
            protected(IsAuthenticated),
            protected(AllowAny, IsAuthenticated),
        ),
        "APIView lets anonymous callers in, but has no scope for callers who are not users",
    ),
    ("W020", Given(protected(HasAPIKey)), Given(protected(IsAuthenticated)), "authenticates callers by HasAPIKey, but"),
    (
        "W020",
        Given(protected(IsAuthenticated, authentication_classes=())),
        Given(protected(IsAuthenticated, authentication_classes=(), policy={"scope": repr})),
        "APIView has no authentication_classes, but has no scope",
    ),
    (
        "W021",
        Given(idempotent(login_required(view))),
        Given(login_required(idempotent(view))),
        "wrong.view: a decorator of django.contrib.auth.decorators is inside the entry point",
    ),
    (
        "W022",
        Given(idempotent(Unused).as_view()),
        Given(idempotent(Page).as_view()),
        "views.Unused is not protected: its dispatch() does not call the handler post().",
    ),
)


@wrong("E019", "Adding is in atomic mode, but writes to 'lite' while its records are in 'default'.")
def effects_in_another_database(project):
    elsewhere = type("Adding", (Adding,), {"queryset": User.objects.using(project.second_database())})
    project.views(idempotent(elsewhere).as_view())
    yield
    project.views(idempotent(mode="lease")(elsewhere).as_view(), idempotent(using="lite")(elsewhere).as_view())


@wrong("W020", "wrong.view authenticates callers by callers_with_keys_of_ninja", pytest.mark.openapi)
def callers_with_keys_of_ninja(project):
    from ninja import NinjaAPI
    from ninja.security import APIKeyHeader, django_auth

    def mounted(auth, **policy):
        api = NinjaAPI(urls_namespace=f"{auth} {policy}", docs_url=None, openapi_url=None)
        api.post("/pay", auth=auth)(idempotent(**policy)(view))
        return api.urls

    class Keys(APIKeyHeader):
        def authenticate(self, request, key):
            return key

    project.views(mounted(Keys()))
    yield
    project.views(mounted(Keys(), scope=repr), mounted(django_auth))
