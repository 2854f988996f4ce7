"""The view that every package protects, and what a test can learn of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import Group, User
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

runs: Counter[str] = Counter()
# by reference: what is to happen in its first run, after its effect
during: dict[str, Callable[[], None]] = {}


class Tokens(BaseAuthentication):
    """``Authorization: Token alice/2`` is the second token of alice."""

    def authenticate(self, request: Request) -> tuple[User, None] | None:
        name = (
            request.headers.get("Authorization", "")
            .removeprefix("Token ")
            .partition("/")[0]
        )
        return (User.objects.get_or_create(username=name)[0], None) if name else None

    def authenticate_header(self, request: Request) -> str:
        return "Token"


class Payments(APIView):
    authentication_classes = [Tokens]
    permission_classes = [IsAuthenticated]

    def post(self, request: Request) -> Response:
        return pay(request)


def pay(request: Request) -> Response:
    """Respond with the status that the request asks for, and write a row."""
    reference, status = request.data["reference"], request.data["status"]
    runs[reference] += 1
    if status == 500:
        raise RuntimeError("as asked for")
    Group.objects.create(name=f"{reference} {uuid4()}")
    during.pop(reference, lambda: None)()
    return Response({"payment": str(uuid4())}, status=status)


def effects(reference: str) -> int:
    return Group.objects.filter(name__startswith=reference).count()


def protected(*mixins: type, **attributes: Any) -> Any:
    return type("Protected", (*mixins, Payments), attributes).as_view()  # type: ignore[attr-defined]
