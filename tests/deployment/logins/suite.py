"""What django-axes and django-otp have counted is the same with a fresh key for each guess as without keys."""

from __future__ import annotations

from unittest import mock
from uuid import uuid4

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth import authenticate, get_user_model
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpResponse
from django.test import TransactionTestCase, override_settings
from django.urls import path
from django_otp.plugins.otp_static.models import StaticDevice
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.decorators import idempotent
from django_idempotency.rest_framework import IdempotentMixin


def is_let_in(request):
    """Password, watched by django-axes; or one-time code, whose failures django-otp counts."""
    if "password" in request.POST:
        return authenticate(request, username="carol", password=request.POST["password"]) is not None
    device = get_user_model().objects.get(username="carol").staticdevice_set.get()
    return device.verify_token(request.POST["code"])


def returned(request):
    return HttpResponse(status=200 if is_let_in(request) else 401)


def raised(request):
    if not is_let_in(request):
        raise PermissionDenied
    return HttpResponse()


class Returned(IdempotentMixin, APIView):
    authentication_classes = permission_classes = ()

    def post(self, request):
        return Response({}, status=200 if is_let_in(request._request) else 422)


class Raised(IdempotentMixin, APIView):
    authentication_classes = permission_classes = ()

    def post(self, request):
        if not is_let_in(request._request):
            raise ValidationError
        return Response({})


urlpatterns = [
    path("decorator/returned/", idempotent(returned)),
    path("decorator/raised/", idempotent(raised)),
    path("middleware/returned/", returned),
    path("middleware/raised/", raised),
    path("mixin/returned/", Returned.as_view()),
    path("mixin/raised/", Raised.as_view()),
]

WAYS = [f"/{by}/{how}/" for by in ("decorator", "middleware", "mixin") for how in ("returned", "raised")]


@override_settings(ROOT_URLCONF=__name__)
class InAutocommit(TransactionTestCase):
    keeping = WAYS

    def setUp(self):
        carol = get_user_model().objects.create_user("carol", password="right")
        self.device = StaticDevice.objects.create(user=carol)
        self.device.token_set.create(token="right")

    def guess(self, way, *, keyed, **guess):
        headers = {"Idempotency-Key": str(uuid4())} if keyed else {}
        return self.client.post(way, guess, headers=headers).status_code

    def counted(self):
        """What both have counted so far, which is forgotten then."""
        device = StaticDevice.objects.get()
        counts = (
            device.throttling_failure_count,
            sum(AccessAttempt.objects.values_list("failures_since_start", flat=True)),
        )
        device.throttle_reset()
        AccessAttempt.objects.all().delete()
        return counts

    def test_a_failure_counts_as_without_a_key(self):
        for way in WAYS:
            with self.subTest(way):
                plain = [self.guess(way, keyed=False, **wrong) for wrong in ({"code": "x"}, {"password": "x"})]
                counted = self.counted()
                keyed = [self.guess(way, keyed=True, **wrong) for wrong in ({"code": "x"}, {"password": "x"})]
                assert (keyed, self.counted()) == (plain, counted)
                assert counted == ((1, 1) if way in self.keeping else (0, 0))

    def test_a_fresh_key_for_each_guess_does_not_get_around_the_lockout(self):
        for way in self.keeping:
            with self.subTest(way):
                self.guess(way, keyed=True, code="x")
                assert self.guess(way, keyed=True, code="right") >= 400
                for _guess in range(settings.AXES_FAILURE_LIMIT):
                    self.guess(way, keyed=True, password="x")
                assert self.guess(way, keyed=True, password="right") >= 400
                self.counted()


class UnderAtomicRequests(InAutocommit):
    keeping = [way for way in WAYS if way.endswith("returned/")]

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(connection.settings_dict, ATOMIC_REQUESTS=True))
