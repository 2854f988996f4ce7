"""The middleware leaves the admin's own views alone, which send no header, and no others."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path

from testproject.models import LedgerEntry

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def anna(django_user_model, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    client = Client()
    client.force_login(django_user_model.objects.create_superuser("anna", password="secret"))
    return client


class Entries(admin.ModelAdmin):
    fields = ("kind", "user", "amount", "currency", "reference")

    def get_urls(self):
        return [path("close/", self.admin_site.admin_view(self.close)), *super().get_urls()]

    def close(self, request):
        return HttpResponse("closed")


def test_the_middleware_requires_no_key_of_the_admin(anna, settings):
    site = admin.AdminSite()
    site.register(LedgerEntry, Entries)
    settings.ROOT_URLCONF = (path("admin/", site.urls),)
    login = anna.post("/admin/login/", {"username": "anna", "password": "secret", "next": "/admin/"})
    assert (login.status_code, login["Location"]) == (302, "/admin/"), "signed in already, and again"
    entry = {"kind": "deposit", "user": login.wsgi_request.user.pk, "amount": 5, "currency": "eur", "reference": "pen"}
    assert anna.post("/admin/testproject/ledgerentry/add/", entry).status_code == 302
    assert LedgerEntry.objects.count() == 1
    assert anna.post("/admin/testproject/ledgerentry/close/").content == b"closed"
    assert anna.post("/admin/logout/").status_code == 200


def test_the_middleware_requires_a_key_of_pages_below_the_admins_path(anna, settings):
    own = [path("report/", lambda request: HttpResponse("done"))]
    settings.ROOT_URLCONF = (path("admin/", include((own, "admin"))),)
    assert anna.post("/admin/report/").json()["code"] == "idempotency_key_missing"
