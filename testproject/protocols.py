"""The routes of published protocols, by ``django_idempotency.contrib.profiles``."""

from __future__ import annotations

from django.urls import path

from django_idempotency.contrib import profiles
from testproject import checkout, stripe_api

BY_UCP = {"idempotency_policy": profiles.ucp()}

urlpatterns = [
    path("v1/charges", stripe_api.ChargeView.as_view()),
    path("acp/checkout_sessions", checkout.Sessions.as_view()),
    path("acp/checkout_sessions/<uuid:id>/complete", checkout.Completion.as_view()),
    path("ucp/checkout-sessions", checkout.Sessions.as_view(**BY_UCP)),
    path(
        "ucp/checkout-sessions/<uuid:id>/complete",
        checkout.Completion.as_view(**BY_UCP),
    ),
]
