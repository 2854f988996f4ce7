from __future__ import annotations

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import CreateView
from rest_framework.decorators import action, api_view
from rest_framework.permissions import AllowAny, IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Policy
from django_idempotency.webhooks import WebhookView
from tests.deployment.wrong import Given, Page, aview, table, view, wrong

POLICY = Policy(required=True)
on_post = method_decorator(idempotent, name="post")
in_dispatch = method_decorator(transaction.atomic, name="dispatch")


class Revisions:
    """django-reversion's middleware, as far as it shows in a project."""

    atomic = True
    __module__ = "reversion.middleware"

    def __init__(self, get_response):
        self.get_response = get_response


class RevisionsApart(Revisions):
    atomic = False


class AsyncPage(View):
    async def post(self, request):
        return HttpResponse()


class Adding(CreateView):
    model = User
    fields = ("username",)


class Policed(Page):
    idempotency_policy = POLICY


class Policies(Page):
    policy = POLICY


class Api(APIView):
    permission_classes = ()

    def post(self, request):
        return Response()


class AsyncApi(APIView):
    """As adrf's."""

    async def post(self, request):
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


class Unused(Page):
    def dispatch(self, request, *args, **kwargs):
        return view(request)


class Dispatcher(Page):
    def dispatch(self, request, *args, **kwargs):
        return getattr(self, request.method.lower())(request)


class Delegating(Page):
    def dispatch(self, request, *args, **kwargs):
        return self.handle(request)

    def handle(self, request):
        return super().dispatch(request)


def new(*bases, **attributes):
    """A class of its own, because decorators leave marks."""
    return type(bases[0].__name__, bases, attributes)


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
    idempotent(transaction.atomic(view)),
    idempotent(mode="lease")(aview),
    Hook.as_view(),
)


class HasAPIKey(IsAuthenticated):
    """As in djangorestframework-api-key."""


def new(*bases, **attributes):
    """A class of its own, because decorators leave marks."""
    return type(bases[0].__name__, bases, attributes)


def protected(*permissions, policy=(), **attributes):
    api = new(APIView, **{"permission_classes": permissions} | attributes)
    return idempotent(**dict(policy))(api).as_view()


table(
    (
        "W022",
        Given(idempotent(Unused).as_view()),
        Given(
            *(
                idempotent(cls).as_view()
                for cls in (Page, Dispatcher, Delegating, new(Api))
            )
        ),
        (
            "views.Unused is not protected: its dispatch() does not call the handler"
            " post()."
        ),
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
        (
            "APIView lets anonymous callers in, but has no scope for callers who are"
            " not users"
        ),
    ),
    (
        "W020",
        Given(protected(HasAPIKey)),
        Given(protected(IsAuthenticated)),
        "authenticates callers by HasAPIKey, but",
    ),
    (
        "W020",
        Given(protected(IsAuthenticated, authentication_classes=())),
        Given(
            protected(
                IsAuthenticated, authentication_classes=(), policy={"scope": repr}
            )
        ),
        "APIView has no authentication_classes, but has no scope",
    ),
    (
        "E015",
        Given(Policed.as_view()),
        IN_ORDER,
        "Policed has a policy in its attribute idempotency_policy, which",
    ),
    (
        "E015",
        Given(new(Api, idempotency_policy=POLICY).as_view()),
        IN_ORDER,
        "Api has a policy in its attribute",
    ),
    (
        "E015",
        Given(Policies.as_view()),
        IN_ORDER,
        "Policies has a policy in its attribute policy, which",
    ),
    (
        "W021",
        Given(idempotent(login_required(view))),
        Given(login_required(idempotent(view))),
        (
            "wrong.view: a decorator of django.contrib.auth.decorators is inside the"
            " entry point"
        ),
    ),
)


@wrong(
    "E019",
    "Adding is in atomic mode, but writes to 'lite' while its records are in"
    " 'default'.",
)
def effects_in_another_database(project):
    elsewhere = type(
        "Adding", (Adding,), {"queryset": User.objects.using(project.second_database())}
    )
    project.views(idempotent(elsewhere).as_view())
    yield
    project.views(
        idempotent(mode="lease")(elsewhere).as_view(),
        idempotent(using="lite")(elsewhere).as_view(),
    )


@wrong(
    "W020",
    "wrong.view authenticates callers by callers_with_keys_of_ninja",
    pytest.mark.openapi,
)
def callers_with_keys_of_ninja(project):
    from ninja import NinjaAPI
    from ninja.security import APIKeyHeader, django_auth

    def mounted(auth, **policy):
        api = NinjaAPI(
            urls_namespace=f"{auth} {policy}", docs_url=None, openapi_url=None
        )
        api.post("/pay", auth=auth)(idempotent(**policy)(view))
        return api.urls

    class Keys(APIKeyHeader):
        def authenticate(self, request, key):
            return key

    project.views(mounted(Keys()))
    yield
    project.views(mounted(Keys(), scope=repr), mounted(django_auth))


@wrong(
    "E013",
    "wrong.views.Revisions opens a transaction around every view, in which no key can"
    " be claimed",
)
def revisions_in_a_transaction(project):
    project.settings.MIDDLEWARE = [f"{__name__}.Revisions"]
    yield
    project.settings.MIDDLEWARE = [f"{__name__}.RevisionsApart"]


@wrong("W016", "wrong.views.AsyncApi is an async class of REST framework")
def an_async_class_of_rest_framework(project):
    project.settings.MIDDLEWARE = [
        "django_idempotency.middleware.IdempotencyMiddleware"
    ]
    project.views(csrf_exempt(AsyncApi.as_view()))
    yield
    project.views(Api.as_view(), idempotency_exempt(new(AsyncApi)).as_view())


table(
    (
        "E010",
        Given(idempotent(aview)),
        Given(idempotent(mode="lease")(aview)),
        "wrong.aview is async, but its policy is in atomic mode",
    ),
    (
        "E010",
        Given(idempotent(new(AsyncPage)).as_view()),
        Given(idempotent(mode="lease")(new(AsyncPage)).as_view()),
        "AsyncPage is async",
    ),
    (
        "E011",
        Given(transaction.atomic(idempotent(view))),
        Given(idempotent(transaction.atomic(view))),
        "wrong.view: @transaction.atomic is above the entry point",
    ),
    (
        "E011",
        Given(transaction.atomic(idempotent(new(Page)).as_view())),
        Given(idempotent(transaction.atomic(new(Page).as_view()))),
        "Page: @transaction.atomic is above the entry point",
    ),
    (
        "E011",
        Given(in_dispatch(idempotent(new(Page))).as_view()),
        Given(idempotent(in_dispatch(new(Page))).as_view()),
        "Page: @transaction.atomic is above the entry point",
    ),
    (
        "E012",
        Given(api_view(["PUT"])(idempotent(view))),
        Given(idempotent(api_view(["PUT"])(view))),
        "view: @idempotent is below @api_view",
    ),
    (
        "E012",
        Given(api_view(["POST"])(idempotent(view))),
        Given(idempotent(api_view(["POST"])(view))),
        "view: @idempotent is below @api_view",
    ),
)
