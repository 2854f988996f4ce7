"""The strip on top of the pages says what to look at now, or that there is nothing."""

from __future__ import annotations

import re
from html import unescape

import pytest

from django_idempotency.admin import pages
from django_idempotency.admin.alarms import alarms_shown
from django_idempotency.maintenance.stats import Alarms
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from tests.admin.pages import LIST
from tests.support.threads import locked

PAGES = [f"{LIST}dashboard/", LIST, f"{LIST}?situation=done", f"{LIST}?q=done"]
STRIP = re.compile(r'<p class="idempotency-alarms.*?</p>', re.DOTALL)
LATE = "did not respond"


def strip(html):
    """What the strip says, and the pages that it leads to."""
    (found,) = STRIP.findall(html)
    return " ".join(re.sub(r"<[^>]+>", " ", found).split()), re.findall(r'href="([^"]+)"', unescape(found))


def test_an_alarm_is_worded_with_its_number_and_age():
    found = alarms_shown(Alarms(stuck=12, stuck_oldest=1200.4, on_hold=10_000, on_hold_oldest=2 * 86400))
    assert [alarm.text for alarm in found] == ["12 stuck, oldest 20 min", "10,000 or more on hold, oldest 2 d"]
    assert alarms_shown(Alarms(stuck=0, stuck_oldest=0, on_hold=0, on_hold_oldest=0)) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_strip_shows_what_is_stuck_and_links_to_it(client, staff, records, page):
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


@pytest.mark.postgresql
def test_a_strip_that_is_not_in_time_says_so(client, superuser, records, transactional_db, monkeypatch):
    monkeypatch.setattr(pages, "SECONDS", 0.1)
    with locked("django_idempotency_record"):
        response = client.get(f"{LIST}dashboard/")
    assert response.status_code == 200
    assert LATE in response.content.decode()
