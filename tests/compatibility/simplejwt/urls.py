from __future__ import annotations

from uuid import uuid4

from django.contrib.auth import get_user_model
from django.urls import path
from rest_framework.exceptions import ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework_simplejwt.authentication import (
    JWTAuthentication,
    JWTStatelessUserAuthentication,
)
from rest_framework_simplejwt.token_blacklist.models import BlacklistedToken
from rest_framework_simplejwt.tokens import AccessToken, RefreshToken
from rest_framework_simplejwt.views import TokenObtainPairView

from tests.compatibility.project import Project, ask, write


class Payment(APIView):
    authentication_classes = [JWTAuthentication]
    permission_classes = [IsAuthenticated]

    def post(self, request):
        reference, refuse = request.data.values()
        if refuse:
            RefreshToken.for_user(carol()).blacklist()
            raise ValidationError
        write(reference)
        return Response({"paid": str(uuid4())}, status=201)


class StatelessPayment(Payment):
    authentication_classes = [JWTStatelessUserAuthentication]


def carol():
    return get_user_model().objects.get_or_create(username="carol")[0]


def bearer(user, **claims):
    token = AccessToken.for_user(user)
    token.payload |= claims
    return {"Authorization": f"Bearer {token}"}


class Tokens(Project):
    def __init__(self, path):
        self.path = path

    def headers(self):
        return bearer(carol())  # a new token for each request

    def take_bookings(self):
        return BlacklistedToken.objects.all().delete()[0]

    def check(self):
        key = reference = f"r{self.path}"
        paid = self.send(reference, key)
        assert paid.status_code == 201
        assert self.send(reference, key, **bearer(carol(), exp=1)).status_code == 401, (
            "an expired session"
        )
        assert self.send(reference, key).content == paid.content, "and a renewed one"
        dave = get_user_model().objects.get_or_create(username="dave")[0]
        other = self.send(f"{reference} dave", key, **bearer(dave))
        assert (other.status_code, self.effects(f"{reference} dave")) == (
            201,
            1,
        ), "a key is its user's own"
        self._logins_take_no_key()

    def _logins_take_no_key(self):
        user = carol()
        user.set_password("right")
        user.save()
        for _ in range(2):
            tokens = ask(
                "POST",
                "/token/",
                {"username": "carol", "password": "right"},
                **{"Idempotency-Key": "login"},
            )
            assert (tokens.status_code, "Idempotent-Replayed" in tokens.headers) == (
                200,
                False,
            )


PROJECTS = {
    "djangorestframework-simplejwt": Tokens("/pay/"),
    "djangorestframework-simplejwt, stateless users": Tokens("/stateless/"),
}
urlpatterns = [
    path("pay/", Payment.as_view()),
    path("stateless/", StatelessPayment.as_view()),
    path("token/", TokenObtainPairView.as_view()),
]
