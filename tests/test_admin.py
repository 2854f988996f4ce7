"""The admin shows what is stuck, finds a key by the primary key, changes nothing, and keeps bodies to a few."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from django_idempotency import engine
from django_idempotency.keys import record_id
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Fail, Keep, Operation, StoredResponse
from django_idempotency.policy import Policy

LIST = "/admin/django_idempotency/idempotencyrecord/"
LEASE = Policy(mode="lease", lease=60)
BODY = b"<b>secret</b>\xff\0"


@pytest.fixture
def staff(client, django_user_model, settings):
    """A member of staff who may see records."""
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    user = django_user_model.objects.create_user("staff", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencyrecord"))
    client.force_login(user)
    return user


def claimed(key, scope="user:1", **policy):
    operation = Operation(scope, key, b"f" * 32, "POST", f"/pay/{key}/")
    return engine.claim(operation, LEASE.over(Policy(**policy)) if policy else LEASE)


def ended(key, verdict, **named):
    claim = claimed(key, **named)
    with engine.execution(claim, LEASE) as run:
        run.settle(verdict)
    return claim


@pytest.fixture
def records(db):
    """One of each: running, stuck, done, failed, held."""
    claimed("running")
    claimed("stuck")
    ended("done", Keep(StoredResponse(201, (("X-Kept", "kept"),), BODY)))
    ended("done", Keep(StoredResponse(201)), scope="user:2")
    ended("failed", Fail("ValueError"))
    ended("held", Fail("its lease ran out", held=True))
    hours_ago = timezone.now() - timedelta(hours=3, minutes=7)
    IdempotencyRecord.objects.filter(key="stuck").update(locked_at=hours_ago, locked_until=hours_ago)


def listed(client, query=""):
    """The keys in the list, in order."""
    response = client.get(LIST + query)
    assert response.status_code == 200
    return [record.key for record in response.context["cl"].result_list]


def page(client, key, scope="user:1"):
    response = client.get(f"{LIST}{record_id(scope, key)}/change/")
    assert response.status_code == 200
    return response.content.decode()


def test_the_list_shows_key_scope_status_request_and_age(client, staff, records):
    content = client.get(LIST).content.decode()
    for shown in ("running", "user:2", "processing", "/pay/held/", "POST", "3:07:0"):
        assert shown in content
    assert sorted(listed(client)) == ["done", "done", "failed", "held", "running", "stuck"]


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("?status__exact=processing", ["running", "stuck"]),
        ("?status__exact=completed", ["done", "done"]),
        ("?situation=stuck", ["stuck"]),
        ("?situation=held", ["held"]),
        ("?situation=retryable", ["failed"]),
        ("?mode__exact=lease&method__exact=POST&situation=held", ["held"]),
        ("?mode__exact=atomic", []),
    ],
)
def test_the_filters(client, staff, records, query, keys):
    assert sorted(listed(client, query)) == keys


def test_the_longest_running_can_be_put_first(client, staff, records):
    column = admin.site.get_model_admin(IdempotencyRecord).list_display.index("processing_for") + 1
    assert listed(client, f"?o={column}&status__exact=processing") == ["stuck", "running"]


@pytest.mark.parametrize("term", ["done", '"done"', " done "])
def test_a_key_is_found_in_every_scope_as_the_client_sent_it(client, staff, records, term):
    assert listed(client, f"?q={term}") == ["done", "done"]


@pytest.mark.parametrize("term", ["don", "one", "user:1", "DONE", "é", "x" * 300])
def test_anything_but_a_whole_key_finds_nothing(client, staff, records, term):
    assert listed(client, f"?q={term}") == []


@pytest.mark.postgresql
def test_the_search_is_a_range_of_the_primary_key(client, staff, records):
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    with CaptureQueriesContext(connection) as captured:
        listed(client, "?q=done")
    searches = [query["sql"] for query in captured if "BETWEEN" in query["sql"]]
    assert searches
    for search in searches:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {search}")
            plan = "\n".join(row[0] for row in cursor.fetchall())
        assert "django_idempotency_record_pkey" in plan
        assert "Index Cond: ((id >= " in plan


def test_the_list_does_not_fetch_bodies(client, staff, records):
    with CaptureQueriesContext(connection) as captured:
        listed(client)
    assert not [query for query in captured if "response_body" in query["sql"]]


def test_a_body_is_shown_only_with_its_own_permission(client, staff, records):
    without = page(client, "done")
    assert "X-Kept" in without
    assert "secret" not in without
    staff.user_permissions.add(Permission.objects.get(codename="view_response_body"))
    shown = page(client, "done")
    assert r"<pre>&lt;b&gt;secret&lt;/b&gt;\xff" in shown
    assert "<b>secret" not in shown


def test_every_record_has_a_page_with_its_fingerprint(client, staff, records):
    for key in ("running", "stuck", "done", "failed", "held"):
        assert (b"f" * 32).hex() in page(client, key)
    assert "its lease ran out" in page(client, "held")


def test_without_the_permission_there_is_nothing_to_see(client, staff, records):
    staff.user_permissions.clear()
    assert client.get(LIST).status_code == 403


@pytest.mark.parametrize("superuser", [False, True])
def test_nothing_can_be_added_changed_or_deleted(client, staff, records, superuser):
    staff.is_superuser = superuser
    staff.save()
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    record = f"{LIST}{record_id('user:1', 'stuck')}/"
    for url in (f"{LIST}add/", f"{record}change/", f"{record}delete/"):
        assert client.post(url, {"key": "x", "status": "completed", "post": "yes"}).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [str(record_id("user:1", "stuck"))], "post": "yes"}
    client.post(LIST, chosen)
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before
