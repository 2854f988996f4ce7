"""The pages of the admin on 200,000 records: what the database does for each, and for
how long.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.contrib import admin
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_idempotency.admin.lists import SITUATIONS
from django_idempotency.maintenance.decisions import Act, version
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.keys import record_id
from tests.support.maintained import TABLE
from tests.support.sql import run_sql
from tests.support.statements import explaining, nodes

# A partition with a few rows is read from end to end, and may be.
pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table, pytest.mark.exhaustive]

LIST = "/admin/django_idempotency/idempotencyrecord/"
ROWS = 200_000
MOST_SECONDS = 1.0  # of a machine that does other things, too
ATTEMPTS = 8  # one that stood still just then does not do so each time

# 4,000 in flight, 400 of them stuck; 200 on hold; 6,000 free to retry; the rest have
# ended over a day. The stuck ones and the failures lie between the others, as they
# would.
FILL = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, hold_on_crash, created_at, status,
        attempts, on_hold, reason,
    token, locked_at, locked_until, updated_at, expires_at, purge_at, replays,
        response_status,
    response_headers, response_body
)
SELECT
    gen_random_uuid(), 'user:' || i % 5000, 'key-' || i, (ARRAY['POST', 'POST', 'POST',
        'PUT', 'PATCH'])[1 + i % 5],
    '/api/' || (ARRAY['charges', 'refunds', 'orders',
        'payouts'])[1 + i % 4] || '/' || i % 100000 || '/',
    decode(repeat('ab', 32), 'hex'), CASE WHEN i % 3 = 0 THEN 'lease' ELSE 'atomic'
        END, false, at,
    CASE WHEN kind < 20 THEN 'processing' WHEN kind < 51 THEN 'failed' ELSE 'completed'
        END, 1 + i % 3, kind = 20, '',
    CASE WHEN kind < 20 THEN gen_random_uuid() END, CASE WHEN kind < 20 THEN at END,
    CASE WHEN kind < 2 THEN at + interval '1 minute'
        WHEN kind < 20 THEN now() + random() * interval '1 hour' END,
    at, at + interval '1 day', at + interval '1 day', CASE WHEN i % 97 = 0 THEN i % 7
        ELSE 0 END,
    CASE WHEN kind >= 51 THEN 201 END, CASE
        WHEN kind >= 51 THEN '[["Content-Type", "application/json"]]'::jsonb END,
    CASE WHEN kind >= 51 THEN convert_to(repeat('{{"id": 7}} ', 10), 'UTF8') END
FROM (
    SELECT i, i % 1000 AS kind, now() - interval '1 day' + i * interval '432 ms' AS at
    FROM generate_series(1, {ROWS}) AS i
) AS made
"""


@pytest.fixture(scope="module")
def many(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock():
        try:
            for statement in (
                "SET synchronous_commit = off",
                FILL,
                "RESET synchronous_commit",
                f"VACUUM ANALYZE {TABLE}",
            ):
                run_sql(statement)
            yield
        finally:
            run_sql(f"TRUNCATE {TABLE}")


@pytest.fixture
def person(many, db, client, django_user_model, settings):
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    client.force_login(
        django_user_model.objects.create(
            username="person", is_staff=True, is_superuser=True
        )
    )
    client.get(LIST)  # fills the cache of the content types
    return client


@contextmanager
def watched():
    """The plans of the statements on the records, and all statements with their
    seconds.
    """
    with explaining(TABLE, "COSTS") as plans, CaptureQueriesContext(connection) as sent:
        yield plans, sent


def seconds(sent):
    return sum(float(each["time"]) for each in sent)


def cheap(plans, sent):
    """Nothing read from end to end, and all of it within bounds."""
    assert plans
    assert TABLE not in {
        each["Relation Name"]
        for plan in plans
        for each in nodes(plan)
        if each["Node Type"] == "Seq Scan"
    }
    assert seconds(sent) < MOST_SECONDS, sent.captured_queries


def get(person, query):
    for _attempt in range(ATTEMPTS):
        with watched() as (plans, sent):
            response = person.get(LIST + query)
        assert response.status_code == 200
        if seconds(sent) < MOST_SECONDS:
            break
    cheap(plans, sent)
    return response


CHOSEN = ["&mode__exact=lease", "&p=2"]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_list_is_read_by_its_index_whatever_is_chosen_in_it(person, situation):
    found = get(person, f"?situation={situation}").context["cl"]
    assert 50 <= found.result_count <= 10_000
    for chosen in [*CHOSEN, f"&p={found.paginator.num_pages}", "&all="]:
        get(person, f"?situation={situation}{chosen}")


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_list_may_be_put_in_any_order(person, situation):
    for column in range(1, 9):
        get(person, f"?situation={situation}&o={'-' * (column % 2)}{column}")


def test_a_key_and_an_id_are_found_wherever_they_are(person):
    id = record_id("user:1", "wanted")
    IdempotencyRecord.objects.filter(
        pk=IdempotencyRecord.objects.filter(status="completed")[:1].get().pk
    ).update(id=id, scope="user:1", key="wanted")
    for term in ("wanted", str(id), f"{id.hex}&situation=on_hold"):
        assert [
            record.key for record in get(person, f"?q={term}").context["cl"].result_list
        ] == ["wanted"]
    assert not get(person, "?q=unheard-of").context["cl"].result_list


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_search_by_prefix_reads_the_chosen_list_alone(person, situation):
    assert get(person, f"?situation={situation}&q=user:1").context["cl"].result_list
    assert (
        not get(person, f"?situation={situation}&q=unheard-of")
        .context["cl"]
        .result_list
    )


def test_a_record_its_history_and_what_is_done_to_it(person):
    stuck = list(
        SITUATIONS["stuck"].first(IdempotencyRecord.objects.filter(mode="lease"))[
            : len(Act) * ATTEMPTS
        ]
    )
    for number, act in enumerate(Act):
        record = stuck[number * ATTEMPTS]
        get(person, f"{record.pk}/change/")
        get(person, f"{record.pk}/history/")
        get(person, f"intervene/{act}/?id={record.pk}")
        given = {
            "status": 410,
            "content_type": "text/plain",
            "seconds": 60,
            "note": "why",
        }
        for record in stuck[number * ATTEMPTS :][:ATTEMPTS]:
            with watched() as (plans, sent):
                person.post(
                    f"{LIST}intervene/{act}/",
                    {"record": f"{record.pk} {version(record)}", **given},
                )
            if seconds(sent) < MOST_SECONDS:
                break
        cheap(plans, sent)
