"""docs/jobs.md: its jobs, its command, its action and its form run once."""

from __future__ import annotations

import io
from datetime import date
from unittest.mock import Mock

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.test import Client, override_settings
from django.urls import path

from django_idempotency import NotRun, Rejected, signals
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import heard
from tests.support.pages import FENCE, section, text

pytestmark = pytest.mark.usefixtures("transactional_db")
PAGE = "jobs.md"


def shown(block):
    names = {"__name__": "page"}
    exec(compile(block, PAGE, "exec", dont_inherit=True), names)
    return names


def shown_under(heading):
    (block,) = [
        block
        for language, block in FENCE.findall(section(PAGE, heading))
        if language == "python"
    ]
    return shown(block)


def runs():
    return heard(signals.key_completed)


def test_the_first_example_bills_an_invoice_once():
    bill = shown(FENCE.findall(text(PAGE))[0][1])["bill"]
    with runs() as ran:
        assert [bill(7, amount=5), bill(invoice_id=7, amount=5)] == [{"billed": 5}] * 2
        with pytest.raises(Rejected):
            bill(7, amount=6)
    assert len(ran) == 1


def test_the_job_of_cron_runs_once_a_day(monkeypatch):
    names = shown_under("From cron")
    days = [date(2026, 11, 28), date(2026, 11, 28), date(2026, 11, 29)]
    monkeypatch.setitem(names, "date", Mock(today=iter(days).__next__))
    with runs() as ran:
        assert [names["nightly"]() for _day in days] == [{"rows": 42}] * 3
    assert len(ran) == 2


def test_the_command_pays_out_once_and_fails_if_it_was_not_run(monkeypatch):
    names = shown_under("A command")

    def run():
        output = io.StringIO()
        call_command(names["Command"](stdout=output), "2026-11-28")
        return output.getvalue()

    with runs() as ran:
        assert [run(), run()] == ["3 paid\n"] * 2
    assert len(ran) == 1

    def in_use(day):
        raise NotRun("It is in use.", 5)

    monkeypatch.setitem(names, "pay_out", in_use)
    with pytest.raises(CommandError, match=r"It is in use\. Retry in 5 s\.") as failed:
        run()
    assert failed.value.returncode == 75


def test_the_action_sends_each_receipt_once():
    action = shown_under("An action of the admin")["send_receipts"]
    groups = [Group.objects.create(name=name) for name in "ab"]
    said = []

    class Admin:
        def message_user(self, _request, text, level):
            said.append(text)

    with runs() as ran:
        for _click in range(2):
            action(Admin(), None, Group.objects.all())
    assert sorted(run["operation"].key for run in ran) == sorted(
        f"receipt-{group.pk}" for group in groups
    )
    nothing = dict.fromkeys(
        f"response_{what}" for what in ("status", "headers", "body")
    )
    IdempotencyRecord.objects.filter(key=f"receipt-{groups[0].pk}").update(
        status="failed", on_hold=True, **nothing
    )
    action(Admin(), None, Group.objects.all())
    assert [text.partition(":")[0] for text in said] == ["a"]


def test_a_form_of_the_admin_that_is_saved_twice_adds_one_object(tmp_path, settings):
    page_admin = shown_under(
        "The admin’s add form" if False else "The admin's add form"
    )
    ((_language, template),) = [
        found
        for found in FENCE.findall(section(PAGE, "The admin's add form"))
        if found[0] == "html"
    ]
    (tmp_path / "admin/orders").mkdir(parents=True)
    (tmp_path / "admin/orders/add_form.html").write_text(template)
    site = admin.AdminSite()
    site.register(Group, page_admin["OrderAdmin"])
    User.objects.create_superuser("root", password="root")
    client = Client()
    client.login(username="root", password="root")
    templates = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    with override_settings(
        ROOT_URLCONF=(path("admin/", site.urls),), TEMPLATES=templates
    ):
        form = client.get("/admin/auth/group/add/")
        key = form.content.decode().partition('name="idempotency_key" value="')[2]
        data = {"name": "g", "idempotency_key": key.partition('"')[0]}
        first, second = (client.post("/admin/auth/group/add/", data) for _ in "12")
    assert (first.status_code, second.status_code) == (302, 302)
    assert second["Idempotent-Replayed"] == "true"
    assert Group.objects.filter(name="g").count() == 1
