from __future__ import annotations

from django.contrib.auth.models import User
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

CALLER = 1


class TheCaller(BaseAuthentication):
    """Everybody is the one user that there is, which takes no query: what is measured comes after it."""

    def authenticate(self, request: Request) -> tuple[User, None]:
        return User(pk=CALLER, username="caller"), None
