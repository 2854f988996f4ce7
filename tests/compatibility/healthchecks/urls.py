from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import User
from hc.accounts.models import Project as Account
from hc.api.models import Check, Ping
from hc.urls import urlpatterns as urlpatterns

from tests.compatibility.project import Project, ask

API_KEY = "k" * 32


class Healthchecks(Project):
    path = "/api/v3/checks/"
    effect = Check
    books = False

    def begin(self):
        carol = User.objects.create_user("carol", "carol@example.org")
        Account.objects.create(owner=carol, badge_key="carol", api_key=API_KEY)

    def headers(self):
        return {"X-Api-Key": API_KEY}

    def body(self, reference, *, refuse):
        return {"name": reference, "timeout": "soon" if refuse else 3600}

    def effects(self, reference):
        return Check.objects.filter(name=reference).count()

    def check(self):
        created = self.send("r-pinged", "pinged")
        url = created.json()["ping_url"]
        pings = [
            ask("POST", url[url.index("/ping/") :], **{"Idempotency-Key": "ping"})
            for _ in range(2)
        ]
        assert [ping.status_code for ping in pings] == [200, 200]
        pinged = Check.objects.get(name="r-pinged")
        assert (pinged.n_pings, Ping.objects.filter(owner=pinged).count()) == (
            2,
            2,
        ), "no API key, so no scope"
        assert self.send("r-pinged", "pinged").content == created.content, (
            "as it was when it was created"
        )
        assert (
            self.send("r-pinged", "wrong", **{"X-Api-Key": "w" * 32}).status_code == 401
        )
        page = ask("GET", "/accounts/login/")
        assert page.status_code == 200


PROJECTS = {f"Healthchecks {settings.VERSION}": Healthchecks()}
