"""Packages that change what a view reads and answers, or what its queries ask."""

from __future__ import annotations

from uuid import uuid4

from adrf.decorators import api_view as async_api_view
from django.contrib.auth.models import Group
from django.urls import path
from djangorestframework_camel_case.parser import CamelCaseJSONParser
from djangorestframework_camel_case.render import CamelCaseJSONRenderer
from drf_standardized_errors.handler import exception_handler
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.models import IdempotencyRecord
from tests.compatibility.project import REFUSED, Project, pay, write


class Pay(APIView):
    def post(self, request):
        return self.answer(**request.data)

    def answer(self, reference, refuse):
        write(REFUSED if refuse else reference)
        if refuse:
            return Response({"refused_by": "us"}, status=422)
        return Response({"paid_as": str(uuid4())}, status=201)


class PayInCamelCase(Pay):
    parser_classes = (CamelCaseJSONParser,)
    renderer_classes = (CamelCaseJSONRenderer,)

    def post(self, request):
        return self.answer(request.data["the_reference"], request.data["refuse_it"])


class PayOrRaise(Pay):
    """What a refused payment wrote is undone by REST framework, as without a key."""

    def get_exception_handler(self):
        return exception_handler

    def answer(self, reference, refuse):
        if refuse:
            raise ValidationError({"reference": "unknown"})
        return super().answer(reference, refuse)


@async_api_view(["POST"])
def pay_by_adrf(request):
    return Pay().answer(**request.data)


class CamelCase(Project):
    path = "/camel/"

    def body(self, reference, *, refuse):
        return {"theReference": reference, "refuseIt": refuse}

    def check(self):
        answers = [self.send("r-camel", "camel").json() for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0].keys() == {"paidAs"}


class StandardizedErrors(Project):
    path = "/raising/"
    books = False

    def code(self, refused):
        return refused.json()["errors"][0]["code"]

    def check(self):
        refused = self.send("r-raised", "raised", refuse=True).json()
        assert refused["type"] == "validation_error"
        assert refused["errors"][0]["attr"] == "reference"


class Cachalot(Project):
    """It keeps the rows of a query until their table is written to."""

    def check(self):
        def seen():
            return Group.objects.count(), IdempotencyRecord.objects.count()

        groups, records = seen()
        for number in (1, 1, 2):
            self.send("r-cached", f"cached-{number}")
            done = min(number, 2)
            assert seen() == (groups + done, records + done)


class Whitenoise(Project):
    def check(self):
        assert self.send("r-static", "static").status_code == 201


class Adrf(Project):
    path = "/adrf/"


PROJECTS = {
    "adrf": Adrf(),
    "djangorestframework-camel-case": CamelCase(),
    "drf-standardized-errors": StandardizedErrors(),
    "django-cachalot": Cachalot(),
    "whitenoise": Whitenoise(),
}
urlpatterns = [
    path("pay/", pay),
    path("adrf/", pay_by_adrf),
    path("camel/", PayInCamelCase.as_view()),
    path("raising/", PayOrRaise.as_view()),
]
