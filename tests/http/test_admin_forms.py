"""An object is added once by a form of the admin, however often its button is pressed."""

from __future__ import annotations

import re

import pytest
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path, reverse

from django_idempotency.forms import IdempotentAddMixin
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from testproject.admin import LedgerEntryAdmin
from testproject.models import LedgerEntry, Receipt
from tests.support.checks import found

pytestmark = pytest.mark.usefixtures("transactional_db")

ADD = "/admin/testproject/ledgerentry/add/"
LIST = "/admin/testproject/ledgerentry/"


@pytest.fixture
def user(django_user_model):
    return django_user_model.objects.create_superuser("anna")


@pytest.fixture
def anna(user):
    return signed_in(user)


def signed_in(user):
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def at_admin(settings):
    """Have this admin, and no other, at /admin/."""

    def register(registered, model=LedgerEntry):
        site = admin.AdminSite()
        site.register(model, registered)
        settings.ROOT_URLCONF = (path("admin/", site.urls),)

    return register


def keys_in(page):
    return re.findall(r'name="idempotency_key" value="([^"]+)"', page.content.decode())


def key_in(page):
    (key,) = keys_in(page)
    return key


def add(client, key, at=ADD, **content):
    user = Client.session.fget(client)["_auth_user_id"]
    entry = {"kind": "deposit", "user": user, "amount": 5, "currency": "eur", "reference": "pen", "_save": "Save"}
    return client.post(at, entry | {"idempotency_key": key} | content)


def told(client):
    return re.findall(r'<li class="success">(.*?)</li>', client.get(LIST).content.decode(), re.DOTALL)


def test_a_second_submission_gets_the_first_redirect_and_message(anna):
    key = key_in(anna.get(ADD))
    first, message = add(anna, key), told(anna)
    second, again = add(anna, key), told(anna)
    assert (first.status_code, first["Location"]) == (second.status_code, second["Location"]) == (302, LIST)
    assert (first.get("Idempotent-Replayed"), second["Idempotent-Replayed"]) == (None, "true")
    assert message == again
    assert f'<a href="{LIST}{LedgerEntry.objects.get().pk}/change/">' in message[0]


def test_saving_and_adding_another_gives_a_new_key(anna):
    key = key_in(anna.get(ADD))
    first = add(anna, key, _addanother="1")
    assert first["Location"] == ADD
    another = key_in(anna.get(first["Location"]))
    add(anna, another)
    assert LedgerEntry.objects.count() == 2


def test_a_form_with_errors_has_a_new_key_and_can_be_corrected(anna):
    key = key_in(anna.get(ADD))
    wrong, again = add(anna, key, amount="x"), add(anna, key, amount="x")
    assert (wrong.status_code, wrong.content) == (200, again.content)
    assert key_in(wrong) != key
    assert add(anna, key_in(wrong)).status_code == 302
    assert add(anna, key_in(wrong)).status_code == 302
    assert LedgerEntry.objects.count() == 1


def test_a_popup_tells_its_opener_of_the_same_object(anna):
    page = anna.get(f"{ADD}?_popup=1")
    first, second = (add(anna, key_in(page), at=f"{ADD}?_popup=1", _popup="1") for _time in range(2))
    assert first.content == second.content
    assert str(LedgerEntry.objects.get().pk) in first.content.decode()


def test_changing_an_object_has_no_key(anna):
    add(anna, "")
    page = anna.get(f"{LIST}{LedgerEntry.objects.get().pk}/change/")
    assert (page.status_code, keys_in(page)) == (200, [])


def test_a_user_who_lost_the_add_permission_gets_no_replay(django_user_model):
    clerk = django_user_model.objects.create_user("clerk", is_staff=True)
    clerk.user_permissions.add(Permission.objects.get(codename="add_ledgerentry"))
    client = signed_in(clerk)
    key = key_in(client.get(ADD))
    assert add(client, key).status_code == 302
    clerk.user_permissions.clear()
    assert add(client, key).status_code == 403


@pytest.mark.usefixtures("atomic_requests")
def test_an_admin_form_adds_once_under_atomic_requests(anna):
    key = key_in(anna.get(ADD))
    assert [add(anna, key).status_code for _time in range(2)] == [302, 302]
    assert LedgerEntry.objects.count() == 1


def test_an_add_view_overridden_by_the_project_runs_once(anna, at_admin):
    class Noting(LedgerEntryAdmin):
        def add_view(self, request, form_url="", extra_context=None):
            if request.method == "POST":
                Receipt.objects.create(reference="noted")
            return super().add_view(request, form_url, extra_context)

    at_admin(Noting)
    key = key_in(anna.get(ADD))
    assert [add(anna, key).status_code for _time in range(2)] == [302, 302]
    assert Receipt.objects.count() == 1


def test_the_add_form_of_users_adds_once(anna, at_admin, django_user_model):
    at_admin(type("Users", (IdempotentAddMixin, UserAdmin), {}), django_user_model)
    at = reverse("admin:auth_user_add")
    page = anna.get(at)
    bert = {"username": "bert", "password1": "s3cret-s3cret", "password2": "s3cret-s3cret", "usable_password": "true"}
    answers = [anna.post(at, {"idempotency_key": key_in(page), **bert}) for _time in range(2)]
    assert [answer.status_code for answer in answers] == [302, 302]
    assert answers[0]["Location"] == answers[1]["Location"]
    assert django_user_model.objects.filter(username="bert").count() == 1


TEMPLATES = {
    "admin/mine.html": '{% extends "admin/change_form.html" %}{% block form_top %}<p>mine</p>{% endblock %}',
    "admin/whole.html": "{% load idempotency %}<form>mine {% idempotency_key %}</form>",
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("attribute", ["add_form_template", "change_form_template"])
def test_the_projects_own_template_is_kept(anna, at_admin, settings, template, attribute):
    (engine,) = settings.TEMPLATES
    loaders = [
        ("django.template.loaders.locmem.Loader", TEMPLATES),
        "django.template.loaders.app_directories.Loader",
    ]
    own = {**engine, "APP_DIRS": False, "OPTIONS": {**engine["OPTIONS"], "loaders": loaders}}
    settings.TEMPLATES = [own]
    at_admin(type("Own", (LedgerEntryAdmin,), {attribute: template}))
    page = anna.get(ADD)
    assert "mine" in page.content.decode()
    assert [add(anna, key_in(page)).status_code for _time in range(2)] == [302, 302]
    assert LedgerEntry.objects.count() == 1


def test_the_policy_of_a_model_admin_is_in_force(anna, at_admin):
    policy = {"idempotency_policy": Policy(retention=7200)}
    at_admin(type("Kept", (LedgerEntryAdmin,), policy))
    add(anna, key_in(anna.get(ADD)))
    record = IdempotencyRecord.objects.get()
    assert (record.expires_at - record.updated_at).total_seconds() == pytest.approx(7200, abs=60)


def test_the_mixin_has_to_stand_first():
    with pytest.raises(ImproperlyConfigured, match="comes after ModelAdmin"):
        type("Late", (admin.ModelAdmin, IdempotentAddMixin), {})


def test_effects_in_another_database_are_found_by_the_check(at_admin, settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.Elsewhere"]
    at_admin(LedgerEntryAdmin)
    (message,) = found("E019")
    assert message.msg.startswith("testproject.admin.LedgerEntryAdmin.add_view is in atomic mode, but writes to")


class Elsewhere:
    def db_for_write(self, model, **hints):
        return "elsewhere" if model is LedgerEntry else None


class Entries(admin.ModelAdmin):
    fields = ("kind", "user", "amount", "currency", "reference")

    def get_urls(self):
        return [path("close/", self.admin_site.admin_view(self.close)), *super().get_urls()]

    def close(self, request):
        return HttpResponse("closed")


def test_the_middleware_requires_no_key_of_the_admin(anna, user, at_admin, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    at_admin(Entries)
    user.set_password("secret")
    user.save()
    login = anna.post("/admin/login/", {"username": "anna", "password": "secret", "next": "/admin/"})
    assert (login.status_code, login["Location"]) == (302, "/admin/"), "signed in already, and again"
    anna.force_login(user)
    assert add(anna, "").status_code == 302
    assert LedgerEntry.objects.count() == 1
    assert anna.post(f"{LIST}close/").content == b"closed"
    assert anna.post("/admin/logout/").status_code == 200


def test_the_middleware_requires_a_key_of_pages_below_the_admins_path(anna, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    own = [path("report/", lambda request: HttpResponse("done"))]
    settings.ROOT_URLCONF = (path("admin/", include((own, "admin"))),)
    assert anna.post("/admin/report/").json()["code"] == "idempotency_key_missing"
