"""The dashboard tells what is there, to those who may see it, in time, and under a strict content security policy."""

from __future__ import annotations

import csv
import re
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_idempotency.admin import pages
from django_idempotency.contrib.dashboard.activity import Projection, Span, figures_of
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.contrib.dashboard.pages import STANDARD, Chosen, busiest, charts, measures, table
from django_idempotency.policy import Policy
from django_idempotency.stats.queries import Size, at_most
from tests.admin.pages import LIST
from tests.support.callers import claim, shift
from tests.support.happening import COUNTED_AS, happen
from tests.support.threads import just_before, locked

pytestmark = pytest.mark.usefixtures("payer")

PAGE = f"{LIST}dashboard/"
LATE = "did not respond in time"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ALLOWED_MS = 300


@pytest.fixture
def staff(payer, staff):
    return staff


def shown(client, query=""):
    response = client.get(PAGE + query)
    assert response.status_code == 200
    return response.content.decode()


def words(html):
    """What is written on the page."""
    html = html.replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_the_dashboard_shows_what_happened_what_is_pending_and_the_busiest_views(client, staff):
    happen("shop.views.pay", claimed=90, replayed=6, in_flight=2, key_reused=1, taken_over=1)
    happen("shop.views.refund", hours=5, claimed=100, in_flight=50)
    claim("stuck", policy=Policy())
    shift("stuck", locked_at=-3 * 3600 - 7 * 60, locked_until=-3600)
    text = words(shown(client))
    for figure in (
        "Deduplicated 2.40 % last 24 hours",
        "Conflicts 52 last 24 hours",
        "Mismatches 1 last 24 hours",
        "Takeovers 1 last 24 hours",
        "Oldest 3 h 7 min",
        "Lease ran out ▲ Needs attention: 1",
        "On hold for an operator 0",
        "shop.views.pay 6 100",
        "shop.views.refund 50 150",
    ):
        assert figure in text


SPANS = [("", 96), ("?range=1h", 12), ("?range=6h", 72), ("?range=24h", 96), ("?range=7d", 168), ("?range=x", 96)]


@pytest.mark.parametrize(("query", "spans"), SPANS)
def test_the_charts_are_of_the_chosen_range(client, staff, query, spans):
    happen("shop.views.pay", claimed=1, in_flight=1)
    html = shown(client, query)
    assert html.count(f'viewBox="0 0 {spans} 100"') == 4
    assert html.count("<tr>") > spans
    assert html.count('aria-current="true"') == 1


@pytest.mark.parametrize(("name", "requests"), [("1h", 2), ("6h", 12), ("24h", 112), ("7d", 1112)])
def test_the_range_is_that_of_every_figure_that_is_counted(client, staff, name, requests):
    for hours, count in ((0.2, 2), (3, 10), (20, 100), (100, 1000)):
        happen("shop.views.pay", hours=hours, claimed=count - 1, in_flight=1)
    context = client.get(f"{PAGE}?range={name}").context
    happened, rankings = context["happened"], context["rankings"]
    counted = {figure.name: figure.value for figure in happened["beside"]}
    assert counted["requests with a key"] == f"{requests:,}"
    of_charts = {chart["name"]: chart["whole"] for chart in happened["charts"]}
    conflicts = str(len(str(requests)))
    assert of_charts["conflicts"] == conflicts
    assert [(ranking["views"][0]["count"] if ranking["views"] else None) for ranking in rankings] == [
        f"{requests:,}",
        None,
        conflicts,
    ]


def test_each_view_has_a_page_of_its_own_in_the_same_range(client, staff):
    happen("shop.views.pay", claimed=90, replayed=10, in_flight=2)
    happen("shop.views.refund", claimed=100, in_flight=50)
    html = shown(client, "?range=6h")
    (link,) = set(re.findall(r'href="(\?range=6h&amp;view=shop.views.refund)"', html))
    text = words(shown(client, unescape(link)))
    assert "What happened shop.views.refund" in text
    assert "Conflicts 50 last 6 hours" in text
    assert "Requests with a key 150" in text
    assert "Most requests" not in text  # of all views, as what the records tell is
    assert "Pending" not in text
    assert "shop.views.pay" not in text


def test_an_unknown_view_has_a_page_that_says_that_nothing_was_counted(client, staff):
    happen("shop.views.pay", claimed=90)
    html = shown(client, "?view=%3Cscript%3E")
    assert "Nothing was counted in this period." in words(html)
    assert "<script>" not in html


def test_a_view_that_no_name_can_be_is_none(client, staff):
    happen("shop.views.pay", claimed=90)
    assert "shop.views.pay" in words(shown(client, "?view=%00"))


def exported(client, query):
    response = client.get(f"{PAGE}figures/{query}")
    assert response.status_code == 200, response.content
    return response


def test_the_figures_of_the_charts_are_exported_as_csv_and_json(client, staff):
    happen("shop.views.pay", claimed=90, replayed=10)
    happen("shop.views.refund", claimed=5)
    csv_file, json_file = (exported(client, f"?range=1h&format={name}") for name in ("csv", "json"))
    assert csv_file["Content-Disposition"] == 'attachment; filename="idempotency-1h.csv"'
    rows = list(csv.DictReader(csv_file.content.decode().splitlines()))
    assert len(rows) == 12
    assert [sum(int(row[name]) for row in rows) for name in ("requests", "replays")] == [105, 10]
    found = json_file.json()
    assert {name: found[name] for name in ("database", "view", "range", "seconds_in_span")} == {
        **{"database": "default", "view": None, "range": "1h", "seconds_in_span": 300},
    }
    assert [{name: str(value) for name, value in span.items()} for span in found["spans"]] == rows
    of_one = exported(client, "?range=1h&format=json&view=shop.views.refund").json()
    assert sum(span["requests"] for span in of_one["spans"]) == 5


def test_a_page_leads_to_the_export_of_what_it_shows(client, staff):
    html = shown(client, "?range=6h&view=shop.views.pay")
    links = {unescape(link) for link in re.findall(rf'href="{PAGE}figures/([^"]+)"', html)}
    assert links == {f"?format={name}&range=6h&view=shop.views.pay" for name in ("csv", "json")}


def test_an_export_takes_the_permission_and_a_format(client, staff):
    assert client.get(f"{PAGE}figures/?format=xls").status_code == 404
    assert exported(client, "?format=csv").content.decode().splitlines()[1:] == []  # nothing was counted
    staff.user_permissions.clear()
    assert client.get(f"{PAGE}figures/?format=csv").status_code == 403


def test_the_dashboard_links_to_the_list_of_stuck_records(client, staff):
    claim("stuck", policy=Policy())
    shift("stuck", locked_until=-3600)
    html = shown(client)
    (link,) = set(re.findall(rf'href="({LIST}\?[^"]+)"', html))
    assert [record.key for record in client.get(link).context["cl"].result_list] == ["stuck"]


def test_an_empty_database_is_no_reason_to_fail(client, staff):
    text = words(shown(client))
    assert "Nothing was counted in this period." in text
    assert "Pending 0" in text


def test_the_dashboard_says_when_nothing_is_counted(client, staff, settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": None}}
    assert "the setting STATS_RETENTION is None" in words(shown(client))


def test_the_list_of_records_links_to_the_dashboard(client, staff):
    assert f'href="{PAGE}"' in client.get(LIST).content.decode()


def test_without_the_permission_or_a_login_there_is_nothing_to_see(client, staff):
    staff.user_permissions.clear()
    assert client.get(PAGE).status_code == 403
    client.logout()
    response = client.get(PAGE)
    assert (response.status_code, response["Location"]) == (302, f"/admin/login/?next={PAGE}")


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


def test_each_chart_has_a_title_a_description_and_a_table(client, staff):
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
    return Span(
        since=NOON + timedelta(hours=hours),
        activity=figures_of({COUNTED_AS[name]: count for name, count in counts.items()}),
    )


def test_a_chart_is_described_by_its_highest_bar(settings):
    settings.TIME_ZONE = "UTC"
    history = [span(0, claimed=9), span(1, in_flight=12), span(2, in_flight=3)]
    deduplicated, conflicts, *_others = charts(history, figures_of({}))
    assert conflicts["description"] == "Peak: 12, from 1 Jan, 13:00 UTC on."
    assert (conflicts["top"], len(conflicts["bars"]), conflicts["bars"][0].label) == ("15", 2, "1 Jan, 13:00 UTC: 12")
    assert (deduplicated["description"], deduplicated["line"]) == ("None in this period.", "0")
    assert [moment for moment, _values in table(history)["rows"]] == [f"1 Jan, {hour}:00 UTC" for hour in (14, 13, 12)]


def test_times_are_those_of_the_time_zone_in_force(settings):
    settings.TIME_ZONE = "Asia/Kolkata"
    assert table([span(0)])["begins"] == "1 Jan, 17:30 IST"


def test_a_ranking_is_to_the_scale_of_the_first():
    views = {"a": {"requests": 9, "replays": 2}, "b": {"requests": 5, "replays": 4}}
    found = busiest(views, "replays", Chosen(STANDARD, "", ""))
    assert [(busy["name"], busy["count"], busy["segments"][0].width) for busy in found["views"]] == [
        (["b"], "4", "100"),
        (["a"], "2", "50"),
    ]


def test_the_size_to_come_is_to_the_scale_of_the_size_now():
    size = Size(bytes=1000, table_bytes=800, index_bytes=200, dead_bytes=100)
    now, to_come = measures(size, Projection(expected_bytes=2000))
    assert [(part.name, part.width) for part in now["segments"]] == [("table", "35"), ("dead", "5"), ("indexes", "10")]
    assert to_come["segments"][0].width == "100"
    assert len(measures(size, Projection())) == 1
    assert measures(Size(), Projection()) == []


COUNTERS, RECORDS = "django_idempotency_counter", "django_idempotency_record"


@pytest.mark.row_locks
@pytest.mark.parametrize(
    ("tables", "late"),
    [
        ([COUNTERS], 4),  # of what happened twice, of the size, of the views
        ([COUNTERS, RECORDS], 7),
    ],
    ids=["some", "all"],
)
def test_a_panel_that_takes_too_long_says_so_and_the_others_are_shown(client, staff, monkeypatch, tables, late):
    monkeypatch.setattr(pages, "SECONDS", 0.3)
    claim("k", policy=Policy())
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(locked(table))
        text = words(shown(client))
    assert (text.count(LATE), "Pending 1" in text) == (late, late < 7)


def test_without_the_table_of_counters_there_is_a_page(client, staff, caplog):
    """The package was brought up to date, the database not yet."""
    claim("k", policy=Policy())
    with connection.schema_editor() as editor:
        editor.delete_model(IdempotencyCounter)
    try:
        text = words(shown(client))
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(IdempotencyCounter)
    assert text.count(LATE) == 4
    assert "Pending 1" in text
    assert {entry.event for entry in caplog.records if entry.name == "django_idempotency"} == {"admin"}


@pytest.mark.postgresql
def test_when_the_connection_breaks_there_is_a_page_all_the_same(client, staff, monkeypatch, proxy):
    """Where every request is a transaction too, which Django could not end then."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with just_before("SET LOCAL", proxy.go_away):
        text = words(shown(client))
    assert text.count(LATE) == 7


@pytest.mark.postgresql
def test_the_time_limit_ends_where_autocommit_is_off(transactional_db):
    transaction.set_autocommit(False)
    try:
        with at_most(5, "default"), connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            assert cursor.fetchone() == ("5s",)
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            assert cursor.fetchone() == ("0",)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.postgresql
@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_time_limit_ends_with_the_page(client, staff, in_transaction):
    with transaction.atomic() if in_transaction else CaptureQueriesContext(connection):
        shown(client)
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            assert cursor.fetchone() == ("0",)
