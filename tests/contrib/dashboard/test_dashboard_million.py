"""The dashboard over a million records and a week: what it asks of the database."""

from __future__ import annotations

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
MILLION, LIVE, DUE = 1_000_000, 20_000, 50_000
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
        fill()
        yield
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {TABLE}, {IdempotencyCounter._meta.db_table}")


def fill():
    """A million records, some of them past their time, more that are pending, and the counters of a week."""
    with connection.cursor() as cursor:
        for columns, number in ((COMPLETED, MILLION), (PROCESSING, LIVE)):
            cursor.execute(FILL % (columns, MILLION - DUE, number))
        a_week()
        cursor.execute(f"ANALYZE {TABLE}")


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
