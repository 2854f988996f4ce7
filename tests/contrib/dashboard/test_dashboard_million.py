"""The dashboard over a million records and a week: what it asks of the database; and what an operator sees of fewer."""

from __future__ import annotations

import re

import pytest
from django.contrib import admin
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.models import IdempotencyRecord
from tests.support.happening import a_week

pytestmark = [pytest.mark.postgresql, pytest.mark.exhaustive]

PAGE = "/admin/django_idempotency/idempotencyrecord/dashboard/"
TABLE = IdempotencyRecord._meta.db_table
MILLION, FEWER, LIVE, DUE = 1_000_000, 100_000, 20_000, 50_000
SECONDS = 1.0  # of a machine that does other things, too

FILL = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, created_at, updated_at, expires_at, purge_at, status, token,
    locked_at, locked_until, response_status, response_headers, response_body
)
SELECT gen_random_uuid(), 'user:' || i, i, 'POST', '/charges/', '', 'atomic', at, at, at + '1 day', at + '1 day', %s
FROM (
    SELECT i, now() - i * interval '1 day' / %s AS at FROM generate_series(1, %s) AS i
) AS moments
"""
COMPLETED = "'completed', NULL, NULL, NULL, 201, '[]', repeat('x', 200)::bytea"
PROCESSING = "'processing', gen_random_uuid(), at, at + '20 s', NULL, NULL, NULL"


@pytest.fixture(scope="module")
def million(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock():
        fill(MILLION)
        yield
        empty()


def fill(count):
    """So many records, some of them past their time, more that are pending, and the counters of a week."""
    with connection.cursor() as cursor:
        for columns, number in ((COMPLETED, count), (PROCESSING, LIVE)):
            cursor.execute(FILL % (columns, count - DUE, number))
        a_week()
        cursor.execute(f"ANALYZE {TABLE}")


def empty():
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLE}, {IdempotencyCounter._meta.db_table}")


def nodes(plan):
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@pytest.mark.plain_table  # a partition with a few rows is read from end to end, and may be
@pytest.mark.django_db
@pytest.mark.parametrize("query", ["", "?range=7d"])
def test_a_page_is_fast_and_scans_no_table(million, admin_client, settings, query):
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)

    def asked_for():
        with CaptureQueriesContext(connection) as captured:
            response = admin_client.get(PAGE + query)
        assert response.status_code == 200
        return list(captured)

    def is_fast(page):
        return sum(float(asked["time"]) for asked in page) < SECONDS

    page = asked_for()
    assert is_fast(page) or any(is_fast(asked_for()) for _time in range(9))  # a busy machine is not a slow query
    asked = [query["sql"] for query in page if query["sql"].startswith("SELECT")]
    scans = []
    for sql in asked:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
            (((plan,),),) = [cursor.fetchall()]
        scans += [node for node in nodes(plan[0]["Plan"]) if node.get("Relation Name") == TABLE]
    assert len(scans) >= 5
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}


@pytest.fixture
def person(browser, admin_user):
    """Somebody signed in; what is there is emptied quickly, not record by record."""
    empty()  # the million, when nothing came in between
    fill(FEWER)
    browser.sign_in("admin", "password")
    yield browser
    empty()


@pytest.mark.browser
def test_the_dashboard_is_readable_in_a_browser_in_each_theme_and_width(person):
    """One test, because the records take their time. That the browser did not complain, its fixture sees to."""
    browser = person
    browser.follow("Idempotency records")
    browser.click(".object-tools a[href$='/dashboard/']")
    assert browser.path == PAGE
    for words in ("Deduplicated", "10,000 or more", "shop.api.ChargeViewSet", "Dashed: 1 %"):
        assert words in browser.text
    assert 110_000 < size_in_rows(browser.text) < 130_000
    assert widest_bars(browser) > 60

    browser.find("details.history summary").click()
    assert len(browser.all("details.history tbody tr")) == 96
    browser.follow("7 days")
    assert len(browser.all("details.history tbody tr")) == 168

    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        assert contrast(browser, "figure .bar", "fill") > 3
        assert contrast(browser, ".figures dt", "color") > 4.5
    browser.resize((390, 844))
    assert not browser.scrolls_sideways()


def size_in_rows(text):
    return int(re.search(r"Rows\s+([\d,]+)", text)[1].replace(",", ""))


def widest_bars(browser):
    """How many bars the busiest chart has."""
    return max(len(chart.find_elements("css selector", ".bar")) for chart in browser.all("figure"))


def contrast(browser, selector, name):
    """Of the element's colour to the panel's, by the formula of WCAG 2."""
    script = """
        const element = document.querySelector(arguments[0]);
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        const light = colour => {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
                .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
        };
        const [a, b] = [getComputedStyle(element)[arguments[1]],
            getComputedStyle(element.closest(".panel")).backgroundColor].map(light);
        return Math.max(a, b) / Math.min(a, b);
    """
    return browser.driver.execute_script(script, selector, name)
