"""The dashboard tells what is there, to those who may see it, and in time."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_idempotency.admin import pages
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.maintenance.stats import at_most
from django_idempotency.values.policy import Policy
from tests.admin.pages import LIST
from tests.support.callers import claim, shift
from tests.support.happening import happen
from tests.support.sql import run_sql
from tests.support.threads import just_before, locked
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

PAGE = f"{LIST}dashboard/"
LATE = "did not respond in time"


@pytest.fixture
def staff(payer, staff):
    return staff


def shown(client, query=""):
    response = client.get(PAGE + query)
    assert response.status_code == 200
    return response.content.decode()


def words(html):
    """What is written on the page."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_the_dashboard_shows_what_happened_what_is_pending_and_the_busiest_views(
    client, staff
):
    happen(
        "shop.views.pay",
        claimed=90,
        replayed=6,
        in_flight=2,
        key_reused=1,
        taken_over=1,
    )
    happen("shop.views.refund", hours=5, claimed=100, in_flight=50)
    claim("stuck", policy=Policy())
    shift("stuck", locked_at=-3 * 3600 - 7 * 60, locked_until=-3600)
    text = words(shown(client))
    for figure in (
        "What happened last 24 hours Requests with a key 250 Deduplicated 2.40 %",
        "Conflicts 52 Mismatches 1 Takeovers 1",
        "Oldest 3 h 7 min",
        "Lease ran out ▲ Needs attention: 1",
        "On hold for an operator 0",
        "Most replays last 24 hours At shop.views.pay 6 of 100",
        "Most conflicts last 24 hours At shop.views.refund 50 of 150",
    ):
        assert figure in text


RANGES = [
    ("?range=1h", 2),
    ("?range=6h", 12),
    ("", 112),
    ("?range=x", 112),
    ("?range=7d", 1112),
]


@pytest.mark.parametrize(("query", "requests"), RANGES)
def test_the_range_is_that_of_every_figure_that_is_counted(
    client, staff, query, requests
):
    for hours, count in ((0.2, 2), (3, 10), (20, 100), (100, 1000)):
        happen("shop.views.pay", hours=hours, claimed=count - 1, in_flight=1)
    html = shown(client, query)
    conflicts = len(str(requests))
    assert f"Requests with a key {requests:,} " in words(html)
    assert (
        f"Most conflicts last {'24 hours' if requests == 112 else ''}".strip()
        in words(html)
    )
    assert f"At shop.views.pay {conflicts} of {requests:,}" in words(html)
    assert html.count('aria-current="true"') == 1


def test_the_list_of_records_links_to_the_dashboard(client, staff):
    assert f'href="{PAGE}"' in client.get(LIST).content.decode()


def test_without_the_permission_or_a_login_there_is_nothing_to_see(client, staff):
    staff.user_permissions.clear()
    assert client.get(PAGE).status_code == 403
    client.logout()
    response = client.get(PAGE)
    assert (response.status_code, response["Location"]) == (
        302,
        f"/admin/login/?next={PAGE}",
    )


COUNTERS, RECORDS = "django_idempotency_counter", "django_idempotency_record"


@pytest.mark.row_locks
@pytest.mark.parametrize(
    ("tables", "late"),
    [
        ([COUNTERS], 4),  # what happened, over time, and both rankings
        ([COUNTERS, RECORDS], 8),
    ],
    ids=["some", "all"],
)
def test_a_panel_that_takes_too_long_says_so_and_the_others_are_shown(
    client, staff, monkeypatch, tables, late
):
    monkeypatch.setattr(pages, "SECONDS", 0.3)
    claim("k", policy=Policy())
    # its statistics, which tell the size, are not locked
    if RECORDS in tables and connection.vendor == "mysql":
        late -= 1
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(locked(table))

        def text():
            """On a busy machine the others may take too long, too, now and then."""
            found = words(shown(client))
            assert found.count(LATE) >= late
            return found if found.count(LATE) == late else ""

        assert ("Pending 1" in eventually(text)) == (RECORDS not in tables)


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
    assert {
        entry.event for entry in caplog.records if entry.name == "django_idempotency"
    } == {"admin"}


@pytest.mark.postgresql
def test_when_the_connection_breaks_there_is_a_page_all_the_same(
    client, staff, monkeypatch, proxy
):
    """Where every request is a transaction too, which Django could not end then."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with just_before("SET LOCAL", proxy.go_away):
        text = words(shown(client))
    assert text.count(LATE) == 8


@pytest.mark.postgresql
def test_the_time_limit_ends_where_autocommit_is_off(transactional_db):
    transaction.set_autocommit(False)
    try:
        with at_most(5, "default"):
            assert run_sql("SHOW statement_timeout") == [("5s",)]
        assert run_sql("SHOW statement_timeout") == [("0",)]
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.postgresql
@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_time_limit_ends_with_the_page(client, staff, in_transaction):
    with transaction.atomic() if in_transaction else CaptureQueriesContext(connection):
        shown(client)
        assert run_sql("SHOW statement_timeout") == [("0",)]
