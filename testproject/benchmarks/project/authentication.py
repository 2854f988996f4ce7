from __future__ import annotations

from django.contrib.auth.models import User
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

CALLER = 1


class TheCaller(BaseAuthentication):
    """Every caller is the only user, which takes no query: what is measured comes after
    authentication.
    """

    def authenticate(self, request: Request) -> tuple[User, None]:
        return User(pk=CALLER, username="caller"), None
