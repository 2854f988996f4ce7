"""The strip on top of the pages says what to look at now, or that there is nothing."""

from __future__ import annotations

import importlib
import re
from html import unescape

import pytest
from django.contrib.admin import site
from django.db import connection

import django_idempotency.admin
from django_idempotency.admin import limits
from django_idempotency.admin.alarms import told
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stats.queries import Alarms
from django_idempotency.stores.database import ahead
from tests.admin.pages import LIST, found
from tests.support.threads import OtherThread

INDEX = "/admin/"
PAGES = [INDEX, f"{LIST}dashboard/", LIST, f"{LIST}?situation=done", f"{LIST}?q=done"]
STRIP = re.compile(r'<p class="idempotency-alarms.*?</p>', re.DOTALL)
LATE = "did not answer"


def strip(html):
    """What the strip says, and the pages that it leads to."""
    (found,) = STRIP.findall(html)
    return " ".join(re.sub(r"<[^>]+>", " ", found).split()), re.findall(r'href="([^"]+)"', unescape(found))


def test_what_is_raised_is_told_in_words():
    found = told(Alarms(stuck=12, stuck_oldest=1200.4, on_hold=10_000, on_hold_oldest=2 * 86400))
    assert [alarm.text for alarm in found] == ["12 stuck, oldest 20 min", "10,000 or more on hold, oldest 2 d"]
    assert told(Alarms(stuck=0, stuck_oldest=0, on_hold=0, on_hold_oldest=0)) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_strip_tells_what_is_stuck_and_leads_to_it(client, staff, records, page):
    IdempotencyRecord.objects.filter(key="on_hold").update(updated_at=ahead(-2 * 86400))
    said, links = strip(client.get(page).content.decode())
    assert said == "▲ 1 stuck, oldest 3 h 7 min · 1 on hold, oldest 2 d"
    assert [[each.key for each in client.get(link).context["cl"].result_list] for link in links] == [
        ["stuck"],
        ["on_hold"],
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_strip_says_when_there_is_nothing_to_do(client, staff, db, page):
    assert strip(client.get(page).content.decode()) == ("✓ Nothing is stuck, and nothing is on hold.", [])


def test_the_index_has_a_strip_for_those_who_may_see_records(client, staff, records):
    staff.user_permissions.clear()
    page = client.get(INDEX)
    assert page.status_code == 200
    assert STRIP.findall(page.content.decode()) == []


@pytest.mark.parametrize("own", ["own.html", None])
def test_an_index_of_the_projects_own_is_left_alone(monkeypatch, own):
    monkeypatch.setattr(site, "index_template", own)
    importlib.reload(django_idempotency.admin)
    assert site.index_template == (own or "admin/django_idempotency/index.html")


@pytest.mark.postgresql
def test_the_index_is_shown_though_the_table_is_locked(client, superuser, records, transactional_db, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    locker = OtherThread()
    locker(run, "BEGIN")
    locker(run, "LOCK TABLE django_idempotency_record IN ACCESS EXCLUSIVE MODE")
    try:
        response = client.get(INDEX)
    finally:
        locker(run, "ROLLBACK")
        locker.close()
    assert response.status_code == 200
    assert LATE in response.content.decode()


@pytest.mark.postgresql
@pytest.mark.parametrize("page", ["", "?q=done", "{id}/change/", "{id}/history/", "intervene/allow_retry/?id={id}"])
def test_a_page_that_is_not_in_time_says_so(client, superuser, records, transactional_db, monkeypatch, page):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    monkeypatch.setattr(limits, "PAGE_SECONDS", 0.1)
    address = LIST + page.format(id=found("on_hold").pk)
    locker = OtherThread()
    locker(run, "BEGIN")
    locker(run, "LOCK TABLE django_idempotency_record IN ACCESS EXCLUSIVE MODE")
    try:
        response = client.get(address)
    finally:
        locker(run, "ROLLBACK")
        locker.close()
    assert response.status_code == 503
    assert LATE in response.content.decode()
    assert client.get(address).status_code == 200


def run(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
