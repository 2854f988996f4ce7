from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

import django_idempotency
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Atomic, Body, Lease, Policy
from testproject.api import RefundViewSet
from testproject.urls import urlpatterns as served


class EncryptedViewSet(IdempotentMixin, RefundViewSet):
    idempotency_policy = Policy(body=Body(encrypt=True))


class LockedViewSet(IdempotentMixin, RefundViewSet):
    idempotency_policy = Policy(mode=Atomic(claim="lock"))


class HeldViewSet(IdempotentMixin, RefundViewSet):
    idempotency_policy = Policy(mode=Lease(seconds=3, on_crash="hold"))


urlpatterns = [
    *served,
    path("encrypted/", EncryptedViewSet.as_view({"post": "create"})),
    path("locked/", LockedViewSet.as_view({"post": "create"})),
    path("held/", HeldViewSet.as_view({"post": "create"})),
    path("code/", lambda request: HttpResponse(django_idempotency.__file__)),
]
