from __future__ import annotations

from uuid import uuid4

from debug_toolbar.panels.sql import SQLPanel
from debug_toolbar.store import get_store
from debug_toolbar.toolbar import debug_toolbar_urls
from django.http import HttpResponse
from django.urls import path

from tests.compatibility.project import Project, pay, write


def always(_request):
    return True


def page(_request):
    write("r-page")
    return HttpResponse(f"<html><body>paid {uuid4()}</body></html>", status=201)


class Toolbar(Project):
    def take_bookings(self):
        found = len(list(get_store().request_ids()))
        get_store().clear()
        return found

    def check(self):
        self.path = "/page/"
        first, again = (self.send("r-page", "page").content.decode() for _ in range(2))
        assert [content.count('id="djDebug"') for content in (first, again)] == [1, 1]
        assert first.partition("</body>")[0][:60] == again.partition("</body>")[0][:60]
        assert self.effects("r-page") == 1
        *_, latest = get_store().request_ids()
        statements = get_store().panel(latest, SQLPanel.panel_id)["queries"]
        assert any("django_idempotency" in statement["sql"] for statement in statements)


PROJECTS = {"django-debug-toolbar": Toolbar()}
urlpatterns = [*debug_toolbar_urls(), path("pay/", pay), path("page/", page)]
