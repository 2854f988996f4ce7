from __future__ import annotations

from django.contrib.auth import authenticate, get_user_model
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.urls import path
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
