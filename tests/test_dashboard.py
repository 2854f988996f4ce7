"""The dashboard tells what is there, to those who may see it, in time, and under a strict content security policy."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_idempotency import dashboard
from django_idempotency.dashboard import busiest, charts, measures, table
from django_idempotency.models import IdempotencyTally
from django_idempotency.policy import Policy
from django_idempotency.stats import Activity, Projection, Size, Span
from tests.callers import claim, shift
from tests.happening import happen
from tests.threads import OtherThread, just_before

pytestmark = pytest.mark.usefixtures("payer")

LIST = "/admin/django_idempotency/idempotencyrecord/"
PAGE = f"{LIST}dashboard/"
LATE = "did not answer, or not in time"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ALLOWED_MS = 300


@pytest.fixture
def staff(client, payer, django_user_model, settings):
    """A member of staff who may see records."""
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    user = django_user_model.objects.create_user("staff", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencyrecord"))
    client.force_login(user)
    return user


def shown(client, query=""):
    response = client.get(PAGE + query)
    assert response.status_code == 200
    return response.content.decode()


def words(html):
    """What is written on the page."""
    html = html.replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# --- What it shows ---------------------------------------------------------------------------------------------------


def test_it_shows_what_happened_what_is_pending_and_who_is_busiest(client, staff):
    happen("shop.views.pay", claimed=90, replayed=6, in_flight=2, mismatched=1, taken_over=1)
    happen("shop.views.refund", hours=5, claimed=100, in_flight=50)
    claim("stuck", policy=Policy())
    shift("stuck", locked_at=-3 * 3600 - 7 * 60, locked_until=-3600)
    text = words(shown(client))
    for figure in (
        "Deduplicated 2.40 % last day 6.00 % last hour",
        "Conflicts 52 last day 2 last hour",
        "Mismatches 1 last day 1 last hour",
        "Takeovers 1 last day 1 last hour",
        "Oldest 3 h 7 min",
        "Lease ran out ▲ Have a look: 1",
        "Held for a person 0",
        "shop.views.pay 6 100",
        "shop.views.refund 50 150",
    ):
        assert figure in text


@pytest.mark.parametrize(("query", "spans"), [("", 96), ("?range=24h", 96), ("?range=7d", 168), ("?range=x", 96)])
def test_the_charts_are_of_a_day_or_a_week(client, staff, query, spans):
    happen("shop.views.pay", claimed=1, in_flight=1)
    html = shown(client, query)
    assert html.count(f'viewBox="0 0 {spans} 100"') == 4
    assert html.count("<tr>") > spans
    assert html.count('aria-current="true"') == 1


def test_what_is_stuck_leads_to_the_list_of_it(client, staff):
    claim("stuck", policy=Policy())
    shift("stuck", locked_until=-3600)
    html = shown(client)
    (link,) = re.findall(rf'href="({LIST}\?[^"]+)"', html)
    assert [record.key for record in client.get(link).context["cl"].result_list] == ["stuck"]


def test_an_empty_database_is_no_reason_to_fail(client, staff):
    text = words(shown(client))
    assert "Nothing has been counted in this time." in text
    assert "Pending 0" in text


def test_it_says_when_nothing_is_counted(client, staff, settings):
    settings.IDEMPOTENCY = {"TALLY": None}
    assert "the setting TALLY is None" in words(shown(client))


def test_the_list_of_records_leads_to_it(client, staff):
    assert f'href="{PAGE}"' in client.get(LIST).content.decode()


# --- Who may see it --------------------------------------------------------------------------------------------------


def test_without_the_permission_there_is_nothing_to_see(client, staff):
    staff.user_permissions.clear()
    assert client.get(PAGE).status_code == 403


def test_without_a_login_there_is_a_login(client, staff):
    client.logout()
    response = client.get(PAGE)
    assert (response.status_code, response["Location"]) == (302, f"/admin/login/?next={PAGE}")


# --- How it is made --------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_nothing_inline_nothing_from_elsewhere(client, staff):
    happen("shop.views.pay", claimed=90, replayed=6, in_flight=2)
    tags = Tags()
    tags.feed(shown(client))
    for tag, attributes in tags.found:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")], attributes
        for name in ("src", "href"):
            assert not re.match(r"(\w+:)?//|data:", attributes.get(name) or ""), attributes


def test_each_chart_has_a_title_a_description_and_its_figures_in_a_table(client, staff):
    happen("shop.views.pay", claimed=90, in_flight=7)
    tags = Tags()
    html = shown(client)
    tags.feed(html)
    ids = {attributes["id"] for _tag, attributes in tags.found if attributes.get("id")}
    drawn = [attributes for tag, attributes in tags.found if tag == "svg" and attributes.get("role") == "img"]
    assert len(drawn) == 4
    for attributes in drawn:
        assert set(attributes["aria-labelledby"].split()) <= ids
    assert re.search(r"<td[^>]*>97</td>\s*<td[^>]*>0.00 %</td>\s*<td[^>]*>7</td>", html)


def span(hours, **counts):
    return Span(since=NOON + timedelta(hours=hours), activity=Activity.of(counts))


def test_a_chart_is_described_by_its_highest_bar(settings):
    settings.TIME_ZONE = "UTC"
    history = [span(0, claimed=9), span(1, in_flight=12), span(2, in_flight=3)]
    deduplicated, conflicts, *_others = charts(history, Activity(), Activity())
    assert conflicts.description == "At most 12, from 1 Jan, 13:00 on."
    assert (conflicts.top, len(conflicts.bars), conflicts.bars[0].label) == ("15", 2, "1 Jan, 13:00: 12")
    assert (deduplicated.description, deduplicated.line) == ("None in this time.", "0")
    assert [moment for moment, _values in table(history).rows] == ["1 Jan, 14:00", "1 Jan, 13:00", "1 Jan, 12:00"]


def test_times_are_those_of_the_time_zone_in_force(settings):
    settings.TIME_ZONE = "Asia/Kolkata"
    assert table([span(0)]).begins == "1 Jan, 17:30"


def test_a_ranking_is_to_the_scale_of_the_first():
    found = busiest({"a": Activity(requests=9, replays=2), "b": Activity(requests=5, replays=4)}, "replays")
    assert [(busy.name, busy.count, busy.segments[0].width) for busy in found.views] == [
        (["b"], "4", "100"),
        (["a"], "2", "50"),
    ]


def test_the_size_to_come_is_to_the_scale_of_the_size_now():
    size = Size(bytes=1000, table_bytes=800, index_bytes=200, dead_bytes=100)
    now, to_come = measures(size, Projection(expected_bytes=2000))
    assert [(part.name, part.width) for part in now.segments] == [("table", "35"), ("dead", "5"), ("indexes", "10")]
    assert to_come.segments[0].width == "100"
    assert len(measures(size, Projection())) == 1
    assert measures(Size(), Projection()) == []


# --- In time ---------------------------------------------------------------------------------------------------------


LOCKS = {
    "postgresql": ("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", "ROLLBACK"),
    "mysql": ("LOCK TABLES {} WRITE", "UNLOCK TABLES"),
}


@contextmanager
def locked(name):
    """Nobody can read the table."""
    lock, unlock = LOCKS[connection.vendor]
    elsewhere = OtherThread()
    if connection.vendor == "postgresql":
        elsewhere(run, "BEGIN")
    elsewhere(run, lock.format(name))
    try:
        yield
    finally:
        elsewhere(run, unlock)
        elsewhere.close()


def run(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.row_locks
def test_a_panel_that_takes_too_long_says_so_and_the_others_are_shown(client, staff, monkeypatch):
    monkeypatch.setattr(dashboard, "SECONDS", 0.3)
    claim("k", policy=Policy())
    with locked("django_idempotency_tally"):
        html = shown(client)
    text = words(html)
    assert text.count(LATE) == 4  # of what happened twice, of the size, of the views
    assert "Pending 1" in text


@pytest.mark.row_locks
def test_when_no_panel_is_in_time_there_is_a_page_all_the_same(client, staff, monkeypatch):
    monkeypatch.setattr(dashboard, "SECONDS", 0.1)
    with locked("django_idempotency_tally"), locked("django_idempotency_record"):
        assert words(shown(client)).count(LATE) == 6


def test_without_the_table_of_tallies_there_is_a_page_all_the_same(client, staff, caplog):
    """The package was brought up to date, the database not yet."""
    claim("k", policy=Policy())
    with connection.schema_editor() as editor:
        editor.delete_model(IdempotencyTally)
    try:
        text = words(shown(client))
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(IdempotencyTally)
    assert text.count(LATE) == 4
    assert "Pending 1" in text
    assert {entry.event for entry in caplog.records if entry.name == "django_idempotency"} == {"dashboard"}


@pytest.mark.postgresql
def test_when_the_connection_breaks_there_is_a_page_all_the_same(client, staff, monkeypatch, proxy):
    """Where every request is a transaction too, which Django could not end then."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with just_before("SET LOCAL", proxy.go_away):
        text = words(shown(client))
    assert text.count(LATE) == 6


@pytest.mark.postgresql
@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_time_limit_ends_with_the_page(client, staff, in_transaction):
    with transaction.atomic() if in_transaction else CaptureQueriesContext(connection):
        shown(client)
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            assert cursor.fetchone() == ("0",)
