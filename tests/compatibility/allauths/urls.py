from __future__ import annotations

from urllib.parse import urlencode

from django.contrib.auth.models import User
from django.urls import include, path

from tests.compatibility.project import Project, ask

API = "/_allauth/app/v1/auth/signup"


class Allauth(Project):
    """Signs users up by its form, and refuses them by its API for apps."""

    path = "/accounts/signup/"
    paid = 302
    effect = User
    books = False  # failed attempts are counted in the cache

    def body(self, reference, *, refuse):
        return urlencode(
            {"email": f"{reference}@example.com", "password1": "a-long-passphrase"}
        )

    def send(self, reference, key=None, *, refuse=False, **headers):
        if not refuse:
            return super().send(reference, key, **headers)
        return ask(
            "POST",
            API,
            {"email": ""},
            **headers | ({"Idempotency-Key": key} if key else {}),
        )

    def effects(self, reference):
        return User.objects.filter(email=f"{reference}@example.com").count()

    def check(self):
        """A session that has expired gets allauth's own response, which its middleware
        makes of an exception.
        """
        gone = {"X-Session-Token": "gone"}
        plain, *keyed = (
            self.send("", key, refuse=True, **gone) for key in (None, "gone", "gone")
        )
        assert [plain.status_code, *(each.status_code for each in keyed)] == [410] * 3
        assert [each.json() for each in keyed] == [plain.json()] * 2


PROJECTS = {"django-allauth": Allauth()}
urlpatterns = [
    path("accounts/", include("allauth.urls")),
    path("_allauth/", include("allauth.headless.urls")),
]
