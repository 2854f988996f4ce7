"""The lists and the search find what is stuck by an index, and the strip above them
says what to look at now.
"""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_idempotency import engine
from django_idempotency.admin import pages
from django_idempotency.admin.alarms import alarms_shown
from django_idempotency.maintenance import find
from django_idempotency.maintenance.find import moment
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Keep, Operation, StoredResponse
from django_idempotency.values.policy import Policy
from tests.admin.pages import LIST, claimed, ended
from tests.support.commands import told
from tests.support.sql import run_sql
from tests.support.statements import explaining, nodes
from tests.support.threads import locked


def listed(client, query=""):
    """The keys in the list, in order."""
    response = client.get(LIST + query)
    assert response.status_code == 200
    return [record.key for record in response.context["cl"].result_list]


def test_the_list_shows_first_what_has_been_in_flight_too_long(client, staff, records):
    content = client.get(LIST).content.decode()
    assert listed(client) == ["stuck", "running"]
    for shown in ("user:1", ">lapsed<", "/pay/stuck/", "POST", ">3 h 7 min<"):
        assert shown in content


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("?situation=live", ["stuck", "running"]),
        ("?situation=stuck", ["stuck"]),
        ("?situation=on_hold", ["on_hold"]),
        ("?situation=retryable", ["failed"]),
        ("?situation=done", ["on_hold", "failed", "done", "done"]),
        ("?situation=nonsense", ["stuck", "running"]),
        ("?mode__exact=lease&situation=on_hold", ["on_hold"]),
        ("?mode__exact=atomic", []),
    ],
)
def test_the_filters(client, staff, records, query, keys):
    # what ended within one millisecond has no order on SQLite
    for number, key in enumerate(("done", "failed", "on_hold")):
        IdempotencyRecord.objects.filter(key=key).update(
            purge_at=ahead(24 * 3600 + number)
        )
    assert listed(client, query) == keys


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("situation=done&customer=user:2", ["done of 2"]),
        ("situation=done&customer=user:1", ["done of 1", "failed", "on_hold"]),
        ("situation=done&customer=user", []),
        ("endpoint=/pay/stu", ["stuck"]),
        ("endpoint=POST /pay/", ["running", "stuck"]),
        ("endpoint=PATCH /pay/", []),
        ("since=2026-03-01T11:30", ["running"]),
        ("until=2026-03-01T11:30", ["stuck"]),
        ("since=2026-03-01&until=2026-03-02", ["running", "stuck"]),
        ("since=2026-03-02&until=2026-03-03", []),
        ("since=2026-03-01T11:30&endpoint=/pay/stuck/", []),
        ("situation=done&q=done&customer=user:2", ["done of 2"]),
        ("endpoint=%00", ["running", "stuck"]),
    ],
)
def test_endpoint_customer_and_time_narrow_a_list(client, staff, records, query, keys):
    for key, time in (("stuck", "11:00"), ("running", "12:00")):
        claimed_at = moment(f"2026-03-01T{time}")
        IdempotencyRecord.objects.filter(key=key).update(created_at=claimed_at)
    response = client.get(f"{LIST}?{query}")
    found = response.context["cl"].result_list
    names = [
        f"done of {record.scope[-1]}" if record.key == "done" else record.key
        for record in found
    ]
    assert sorted(names) == keys
    arguments = [f"--{part}" for part in query.replace("customer", "scope").split("&")]
    if "q=" not in query and "%00" not in query:
        situation = [] if "situation" in query else ["--situation=live"]
        (told_of,) = told("idempotency_keys", "list", *situation, *arguments)
        assert len(told_of["records"]) == len(keys)


def test_the_form_keeps_what_else_narrows_the_list(client, staff, records):
    query = "?situation=done&q=do&customer=user:2&o=1"
    page = client.get(LIST + query).content.decode()
    for name, value in (("situation", "done"), ("q", "do"), ("customer", "user:2")):
        assert re.search(f'name="{name}" value="{value}"', page)


def test_a_time_that_is_none_lists_what_there_is(client, staff, records):
    assert client.get(f"{LIST}?since=yesterday").status_code == 302


def test_a_search_reads_as_many_records_as_the_page_says(
    client, staff, db, monkeypatch
):
    """Even where nothing is found."""
    monkeypatch.setattr(find, "MOST", 3)
    for number in range(5):
        ended(f"k{number}", Keep(StoredResponse(201)))
        IdempotencyRecord.objects.filter(key=f"k{number}").update(
            purge_at=ahead(24 * 3600 + number)
        )
    for number, keys in ((4, ["k4"]), (1, [])):
        assert listed(client, f"?situation=done&endpoint=/pay/k{number}/") == keys


def test_a_list_ends_where_it_says(client, staff, db, monkeypatch):
    monkeypatch.setattr(find, "MOST", 3)
    for number in range(5):
        claimed(f"k{number}")
        IdempotencyRecord.objects.filter(key=f"k{number}").update(
            locked_until=ahead(number)
        )
        ended(f"d{number}", Keep(StoredResponse(201)))
        IdempotencyRecord.objects.filter(key=f"d{number}").update(
            purge_at=ahead(24 * 3600 + number)
        )
    assert listed(client) == ["k0", "k1", "k2"]
    assert listed(client, "?q=/pay/k4/") == []
    assert listed(client, "?situation=done") == ["d4", "d3", "d2"]
    assert listed(client, "?q=k4") == ["k4"]


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("?situation=stuck", {"since": "3 h 7 min", "shown_scope": "user:1"}),
        (
            "?situation=on_hold",
            {"since": "2 h", "shown_reason": "its lease ran out", "attempts": "3"},
        ),
        (
            "?situation=retryable",
            {"since": "2 h", "shown_reason": "ValueError", "attempts": "3"},
        ),
        (
            "?q=on_hold",
            {"since": "2 h", "shown_reason": "its lease ran out", "attempts": "3"},
        ),
    ],
)
def test_a_list_shows_what_matters_in_it(client, staff, records, query, shown):
    IdempotencyRecord.objects.filter(status="failed").update(
        updated_at=ahead(-7200), attempts=3
    )
    html = client.get(LIST + query).content.decode()
    assert {name: cell(html, name) for name in shown} == shown


def cell(html, column):
    """What the list's only record shows in a column."""
    (found,) = re.findall(rf'<td class="field-{column}">(.*?)</td>', html, re.DOTALL)
    return re.sub(r"<[^>]+>", "", found).strip()


@pytest.mark.postgresql
def test_a_slow_owner_that_is_alive_is_not_shown_as_stuck(
    client, staff, transactional_db, other_thread
):
    policy = Policy()
    slow, _gone = [
        engine.claim(Operation("user:1", key, b"f" * 32, "POST", "/pay/"), policy)
        for key in ("slow", "gone")
    ]
    IdempotencyRecord.objects.update(locked_until=ahead(-600))
    with engine.execution(slow, policy) as run:
        stuck = other_thread(listed, client, "?situation=stuck")
        in_flight = other_thread(lambda: client.get(LIST).content.decode())
        run.verdict = Keep(StoredResponse(201))
    assert stuck == ["gone"]
    assert in_flight.count(">lapsed<") == 1


@pytest.mark.parametrize("term", ["done", '"done"', " done ", "done&situation=on_hold"])
def test_a_key_is_found_in_every_scope_as_the_client_sent_it(
    client, staff, records, term
):
    assert listed(client, f"?q={term}") == ["done", "done"]


@pytest.mark.parametrize("term", ["%20", '""', "%00", "done%00"])
def test_a_search_for_nothing_lists_what_is_listed_without_one(
    client, staff, records, term
):
    """And never the whole table."""
    assert listed(client, f"?q={term}") == listed(client)


@pytest.mark.parametrize(
    "lookup", ["gt", "startswith", "contains", "regex", "isnull", "exact"]
)
@pytest.mark.parametrize(
    "field", ["response_body", "response_headers", "token", "fingerprint"]
)
def test_a_filter_by_a_hidden_field_is_refused_whatever_the_lookup(
    client, staff, records, lookup, field
):
    before = client.get(f"{LIST}?situation=done&{field}__{lookup}=1")
    assert before.status_code in (302, 400)


@pytest.mark.parametrize("term", ["one", "DONE", "é", "x" * 300, "%25", "_unning"])
def test_a_term_finds_only_beginnings_of_keys_scopes_and_paths(
    client, staff, records, term
):
    assert listed(client, f"?q={term}") == []


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("?q=stu", ["stuck"]),
        ("?q=/pay/run", ["running"]),
        ("?q=user:1", ["stuck", "running"]),
        ("?q=user:1&situation=done", ["done", "failed", "on_hold"]),
        ("?q=user:1&situation=on_hold", ["on_hold"]),
        ("?q=don", []),
        ("?q=don&situation=done", ["done", "done"]),
    ],
)
def test_a_search_finds_what_begins_so_in_the_list(client, staff, records, query, keys):
    assert sorted(listed(client, query)) == sorted(keys)


def test_a_record_is_found_by_its_id(client, staff, records):
    for term in (str(record_id("user:2", "done")), record_id("user:2", "done").hex):
        response = client.get(f"{LIST}?q={term}")
        assert [record.scope for record in response.context["cl"].result_list] == [
            "user:2"
        ]


def test_a_key_that_looks_like_an_id_is_found_as_a_key(client, staff, db):
    key = str(record_id("user:1", "some"))
    claimed("some")
    claimed(key)
    assert listed(client, f"?q={key}") == [key]


@pytest.mark.postgresql
@pytest.mark.plain_table
def test_the_search_is_a_range_of_the_primary_key(client, staff, records):
    run_sql("SET LOCAL enable_seqscan = off")
    with explaining("BETWEEN", only=("SELECT",)) as plans:
        listed(client, "?q=done")
    assert plans
    for plan in plans:
        (scan,) = (
            node
            for node in nodes(plan)
            if node.get("Index Name") == "django_idempotency_record_pkey"
        )
        assert scan["Index Cond"].startswith("((id >= ")


def test_the_list_does_not_fetch_bodies(client, staff, records):
    with CaptureQueriesContext(connection) as captured:
        listed(client)
    assert not [query for query in captured if "response_body" in query["sql"]]


PAGES = [f"{LIST}dashboard/", LIST, f"{LIST}?situation=done", f"{LIST}?q=done"]
STRIP = re.compile(r'<p class="idempotency-alarms.*?</p>', re.DOTALL)
LATE = "did not respond"


def strip(html):
    """What the strip says, and the pages that it leads to."""
    (found,) = STRIP.findall(html)
    return " ".join(re.sub(r"<[^>]+>", " ", found).split()), re.findall(
        r'href="([^"]+)"', unescape(found)
    )


def test_an_alarm_is_worded_with_its_number_and_age():
    found = alarms_shown(
        {
            "stuck": 12,
            "stuck_oldest": 1200.4,
            "on_hold": 10_000,
            "on_hold_oldest": 2 * 86400,
        }
    )
    assert [alarm.text for alarm in found] == [
        "12 stuck, oldest 20 min",
        "10,000 or more on hold, oldest 2 d",
    ]
    assert (
        alarms_shown({"stuck": 0, "stuck_oldest": 0, "on_hold": 0, "on_hold_oldest": 0})
        == []
    )


@pytest.mark.parametrize("page", PAGES)
def test_the_strip_shows_what_is_stuck_and_links_to_it(client, staff, records, page):
    IdempotencyRecord.objects.filter(key="on_hold").update(updated_at=ahead(-2 * 86400))
    said, links = strip(client.get(page).content.decode())
    assert said == "▲ 1 stuck, oldest 3 h 7 min · 1 on hold, oldest 2 d"
    assert [
        [each.key for each in client.get(link).context["cl"].result_list]
        for link in links
    ] == [
        ["stuck"],
        ["on_hold"],
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_strip_says_when_there_is_nothing_to_do(client, staff, db, page):
    assert strip(client.get(page).content.decode()) == (
        "✓ Nothing is stuck, and nothing is on hold.",
        [],
    )


@pytest.mark.postgresql
def test_a_strip_that_is_not_in_time_says_so(
    client, superuser, records, transactional_db, monkeypatch
):
    monkeypatch.setattr(pages, "SECONDS", 0.1)
    with locked("django_idempotency_record"):
        response = client.get(f"{LIST}dashboard/")
    assert response.status_code == 200
    assert LATE in response.content.decode()
