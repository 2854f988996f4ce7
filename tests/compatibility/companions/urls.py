"""Packages that record what is saved, check tokens, or stand around every request, all
at once.
"""

from __future__ import annotations

import json
from datetime import timedelta
from uuid import uuid4

import structlog
from auditlog.models import LogEntry
from csp.decorators import csp_update
from django.contrib.auth import get_user_model
from django.http import JsonResponse
from django.test import Client
from django.urls import path
from django.utils.timezone import now
from easyaudit.models import CRUDEvent
from guardian.models import UserObjectPermission
from guardian.shortcuts import assign_perm
from import_export.resources import modelresource_factory
from knox.auth import TokenAuthentication
from knox.models import AuthToken
from oauth2_provider.contrib.rest_framework import OAuth2Authentication
from oauth2_provider.models import AccessToken
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework_api_key.models import APIKey
from rest_framework_api_key.permissions import HasAPIKey
from tablib import Dataset
from waffle import get_waffle_flag_model
from waffle.decorators import waffle_flag

from tests.compatibility.companions.models import Payment
from tests.compatibility.companions.settings import LOGGED
from tests.compatibility.project import REFUSED, Project

HOUR = timedelta(hours=1)


def pay(request):
    reference, refuse = json.loads(request.body).values()
    payment = Payment.objects.create(
        reference=f"{REFUSED if refuse else reference} {uuid4()}"
    )
    assign_perm("view_payment", request.user, payment)
    structlog.get_logger().info("paid")
    return JsonResponse({"paid": str(uuid4())}, status=422 if refuse else 201)


def carol():
    return get_user_model().objects.get_or_create(username="carol")[0]


class Companion(Project):
    effect = Payment
    books = False

    def begin(self):
        client = Client()
        client.force_login(carol())
        self.session = f"sessionid={client.cookies['sessionid'].value}"

    def headers(self):
        return {"Cookie": self.session}

    def effects(self, reference):
        return Payment.objects.filter(reference__startswith=reference).count()


class Recorded(Companion):
    """``entries``: where the package keeps one of each payment by Carol; the others: in
    which columns.
    """

    books = True

    def __init__(self, entries, payment, user):
        self.entries, self.payment, self.user = entries, payment, user

    def of(self, reference):
        return self.entries.filter(
            **{f"{self.payment}__startswith": reference, self.user: carol().pk}
        )

    def take_bookings(self):
        return self.of(REFUSED).delete()[0]

    def check(self):
        for _ in range(2):
            self.send("r-recorded", "recorded")
        assert self.of("r-recorded").count() == 1


class Structlog(Companion):
    books = True

    def take_bookings(self):
        codes = [each.get("code") for each in LOGGED.entries]
        LOGGED.entries.clear()
        return codes.count(422)

    def check(self):
        LOGGED.entries.clear()
        for _ in range(2):
            self.send("r-logged", "logged")
        ran, replayed = (
            ["request_started", "paid", "request_finished"],
            ["request_started", "request_finished"],
        )
        assert [each["event"] for each in LOGGED.entries] == ran + replayed
        ids = [each["request_id"] for each in LOGGED.entries]
        assert [ids.count(each) for each in ids] == [3, 3, 3, 2, 2]


class Waffle(Companion):
    path = "/flagged/"

    def begin(self):
        super().begin()
        self.session += "; dwf_pay=True"
        self.flag = get_waffle_flag_model().objects.create(name="pay", percent=50)

    def check(self):
        for _ in range(2):
            assert (
                "dwf_pay=True"
                in self.send("r-flagged", "flagged").headers["Set-Cookie"]
            )
        self.flag.everyone = False
        self.flag.save()
        assert self.send("r-flagged", "flagged").status_code == 404


class Csp(Companion):
    path = "/csp/"

    def check(self):
        for reference in ("r-csp", "r-csp", "r-other"):
            sent = self.send(reference, "csp").headers["Content-Security-Policy"]
            assert set(sent.split("; ")) == {"default-src 'self'", "img-src 'none'"}


def import_payments(request):
    reference, refuse = json.loads(request.body).values()
    names = [
        f"{reference} {uuid4()}",
        "too long" * 100 if refuse else f"{reference} {uuid4()}",
    ]
    resource = modelresource_factory(
        Payment, meta_options={"import_id_fields": ["reference"]}
    )()
    result = resource.import_data(
        Dataset(*([name] for name in names), headers=["reference"]),
        use_transactions=True,
    )
    return JsonResponse(
        {"paid": str(uuid4())}, status=422 if result.has_errors() else 201
    )


class ImportExport(Companion):
    path = "/import/"

    def effects(self, reference):
        return super().effects(reference) / 2

    def check(self):
        for key in (None, "imported"):
            assert self.send("r-imported", key, refuse=True).status_code == 422
            assert self.effects("r-imported") == 0, "the import is rolled back"


class PayByToken(APIView):
    """Revokes the token of a payment that it refuses."""

    authentication_classes = (TokenAuthentication, OAuth2Authentication)
    permission_classes = (IsAuthenticated | HasAPIKey,)

    def post(self, request):
        reference, refuse = request.data.values()
        if refuse:
            (
                request.auth
                or APIKey.objects.get_from_key(
                    request.headers["Authorization"].split()[1]
                )
            ).delete()
        else:
            Payment.objects.create(reference=reference)
        return Response({"paid": str(uuid4())}, status=403 if refuse else 201)


class Tokens(Companion):
    """Each request has a new token. A knox token that has expired is refused, and
    deleted, by knox itself.
    """

    path = "/token/"
    books = True

    def __init__(self, model, issue):
        self.model, self.issue, self.issued = model, issue, 0

    def send(self, *args, refuse=False, **named):
        self.issued += 1
        return super().send(
            *args,
            refuse=refuse,
            **{"Authorization": self.issue(good=not refuse)} | named,
        )

    def take_bookings(self):
        gone, self.issued = self.issued - self.model.objects.all().delete()[0], 0
        return gone

    def check(self):
        reference, token = (
            f"r-{self.model.__name__}",
            {"Authorization": self.issue(good=True)},
        )
        first = self.send(reference, reference, **token)
        assert self.send(reference, reference, **token).content == first.content
        assert self.send(reference, "another", refuse=True, **token).status_code == 403
        assert self.send(reference, reference, **token).status_code == 401, (
            "a revoked token gets no replay"
        )
        assert self.send(reference, reference).content == first.content


def knox_token(*, good):
    return (
        f"Token {AuthToken.objects.create(carol(), expiry=HOUR if good else -HOUR)[1]}"
    )


def oauth_token(**_named):
    return (
        "Bearer "
        + AccessToken.objects.create(
            token=str(uuid4()), user=carol(), expires=now() + HOUR
        ).token
    )


def api_key(**_named):
    return f"Api-Key {APIKey.objects.create_key(name='shop')[1]}"


PROJECTS = {
    "django-simple-history": Recorded(Payment.history, "reference", "history_user"),
    "django-auditlog": Recorded(LogEntry.objects, "object_repr", "actor"),
    "django-easy-audit": Recorded(
        CRUDEvent.objects.filter(content_type__model="payment"), "object_repr", "user"
    ),
    "django-pghistory": Recorded(
        Payment.pgh_event_model.objects, "reference", "pgh_context__metadata__user"
    ),
    "django-guardian": Recorded(UserObjectPermission.objects, "object_pk", "user"),
    "django-structlog": Structlog(),
    "django-waffle": Waffle(),
    "django-csp": Csp(),
    "django-import-export": ImportExport(),
    "django-rest-knox": Tokens(AuthToken, knox_token),
    "django-oauth-toolkit": Tokens(AccessToken, oauth_token),
    "djangorestframework-api-key": Tokens(APIKey, api_key),
}
urlpatterns = [
    path("pay/", pay),
    path("flagged/", waffle_flag("pay")(pay)),
    path("csp/", csp_update({"img-src": "'none'"})(pay)),
    path("import/", import_payments),
    path("token/", PayByToken.as_view()),
]
