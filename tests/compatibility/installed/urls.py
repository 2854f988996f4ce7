from __future__ import annotations

import json
from unittest import mock
from uuid import uuid4

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth import authenticate, get_user_model
from django.db import connection
from django.http import JsonResponse
from django.urls import path
from django_otp.plugins.otp_static.models import StaticDevice
from drf_spectacular.generators import SchemaGenerator
from ninja import NinjaAPI, Schema
from ninja.errors import HttpError
from prometheus_client import REGISTRY
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.rest_framework import IdempotentMixin
from tests.compatibility.project import REFUSED, Project, ask, pay, write


def answer(reference, accepted, status):
    if accepted:
        write(reference)
    return JsonResponse({"paid": str(uuid4())}, status=201 if accepted else status)


def pay_with_password(request):
    asked = json.loads(request.body)
    user = authenticate(
        request, username="carol", password="wrong" if asked["refuse"] else "right"
    )
    return answer(asked["reference"], user is not None, 401)


def pay_with_code(request):
    asked = json.loads(request.body)
    device = StaticDevice.objects.get()
    return answer(
        asked["reference"],
        device.verify_token("wrong" if asked["refuse"] else "right"),
        403,
    )


class Guessed(Project):
    """Logins that the package watches."""

    def begin(self):
        if not get_user_model().objects.exists():
            carol = get_user_model().objects.create_user("carol", password="right")
            StaticDevice.objects.create(user=carol)

    def check(self):
        """A fresh key for each guess does not get around the lockout."""
        for atomic_requests in (False, True):
            with mock.patch.dict(
                connection.settings_dict, ATOMIC_REQUESTS=atomic_requests
            ):
                for _guess in range(settings.AXES_FAILURE_LIMIT):
                    assert (
                        self.send("r-guess", str(uuid4()), refuse=True).status_code
                        >= 400
                    )
                assert self.send("r-locked-out", str(uuid4())).status_code >= 400
            assert self.take_bookings() > 0
            assert self.effects("r-locked-out") == 0


class Axes(Guessed):
    path = "/password/"

    def take_bookings(self):
        failures = sum(
            AccessAttempt.objects.values_list("failures_since_start", flat=True)
        )
        AccessAttempt.objects.all().delete()
        return failures


class Otp(Guessed):
    path = "/code/"

    def send(self, *args, **named):
        # one is good for one payment
        StaticDevice.objects.get().token_set.get_or_create(token="right")
        return super().send(*args, **named)

    def take_bookings(self):
        device = StaticDevice.objects.get()
        failures = device.throttling_failure_count
        device.throttle_reset()
        return failures


class Payment(Schema):
    reference: str
    refuse: bool


api = NinjaAPI()


@api.post("pay/", response={201: dict[str, str]})
def pay_by_ninja(request, payment: Payment):
    write(REFUSED if payment.refuse else payment.reference)
    if payment.refuse:
        raise HttpError(422, "refused")
    return 201, {"paid": str(uuid4())}


class Ninja(Project):
    path = "/ninja/pay/"

    def check(self):
        assert "/ninja/pay/" in ask("GET", "/ninja/openapi.json").json()["paths"]


class PaymentSerializer(serializers.Serializer):
    reference = serializers.CharField()
    refuse = serializers.BooleanField()


class PaymentView(IdempotentMixin, APIView):
    """Pay."""

    authentication_classes = permission_classes = ()
    serializer_class = PaymentSerializer

    def post(self, request):
        reference, refuse = request.data.values()
        write(REFUSED if refuse else reference)
        return Response({"paid": str(uuid4())}, status=422 if refuse else 201)


class Spectacular(Project):
    path = "/described/"

    def check(self):
        operation = SchemaGenerator().get_schema(request=None, public=True)["paths"][
            "/described/"
        ]["post"]
        assert "Idempotency-Key" in [
            parameter["name"] for parameter in operation["parameters"]
        ]
        assert operation["description"].startswith("Pay.")


class Cors(Project):
    origin = "https://shop.example"

    def headers(self):
        return {"Origin": self.origin}

    def check(self):
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "idempotency-key",
        }
        preflight = ask("OPTIONS", self.path, **self.headers() | asked)
        assert "idempotency-key" in preflight.headers["Access-Control-Allow-Headers"]
        for response in [
            self.send(reference, "cors")
            for reference in ("r-cors", "r-cors", "r-other")
        ]:
            assert response.headers["Access-Control-Allow-Origin"] == self.origin, (
                response.status_code
            )
            assert (
                "Idempotent-Replayed"
                in response.headers["Access-Control-Expose-Headers"]
            )


class Prometheus(Project):
    def check(self):
        name = "django_http_requests_total_by_view_transport_method_total"
        labels = {
            "view": "tests.compatibility.project.pay",
            "transport": "http",
            "method": "POST",
        }
        before = REGISTRY.get_sample_value(name, labels) or 0
        for _ in range(2):
            self.send("r-metered", "metered")
        assert REGISTRY.get_sample_value(name, labels) == before + 2


PROJECTS = {
    "django-otp": Otp(),
    "django-axes": Axes(),
    "django-ninja": Ninja(),
    "drf-spectacular": Spectacular(),
    "django-cors-headers": Cors(),
    "django-prometheus": Prometheus(),
}
urlpatterns = [
    path("password/", pay_with_password),
    path("code/", pay_with_code),
    path("ninja/", api.urls),
    path("described/", PaymentView.as_view()),
    path("pay/", pay),
]
