"""The admin shows what is stuck, finds a key by the primary key, does what a person may, and keeps bodies to a few."""

from __future__ import annotations

import base64
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import DatabaseError, connection, connections
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from django_idempotency import engine, situations
from django_idempotency.admin import TimeFilter
from django_idempotency.interventions import Act, version
from django_idempotency.keys import record_id
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Fail, Keep, Operation, Replay, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.database import ahead
from tests.callers import stop_heartbeat
from tests.proxy import Cut
from tests.threads import OtherThread

DOCS = Path(__file__).parent.parent / "docs"
LIST = "/admin/django_idempotency/idempotencyrecord/"
LEASE = Policy(mode="lease", lease=60)
BODY = b"<b>secret</b>\xff\0"


@pytest.fixture(autouse=True)
def no_heartbeat():
    """Replays that are not counted yet are forgotten with the test."""
    yield
    stop_heartbeat()


@pytest.fixture
def staff(client, django_user_model, settings):
    """A member of staff who may see records."""
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    user = django_user_model.objects.create_user("staff", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencyrecord"))
    client.force_login(user)
    return user


@pytest.fixture
def superuser(staff):
    staff.is_superuser = True
    staff.save()
    return staff


def claimed(key, scope="user:1", **policy):
    operation = Operation(scope, key, b"f" * 32, "POST", f"/pay/{key}/")
    return engine.claim(operation, Policy(**policy).over(LEASE))


def ended(key, verdict, **named):
    claim = claimed(key, **named)
    policy = {name: value for name, value in named.items() if name != "scope"}
    with engine.execution(claim, Policy(**policy).over(LEASE)) as run:
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


def allow(staff, *codenames):
    staff.user_permissions.add(*Permission.objects.filter(codename__in=codenames))


# --- The list --------------------------------------------------------------------------------------------------------


def test_the_list_shows_first_what_has_been_in_flight_too_long(client, staff, records):
    content = client.get(LIST).content.decode()
    assert listed(client) == ["stuck", "running"]
    for shown in ("user:1", "past its lease", "/pay/stuck/", "POST", "3 h 7 min, lease ran out 3 h 7 min ago"):
        assert shown in content


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("?situation=live", ["stuck", "running"]),
        ("?situation=stuck", ["stuck"]),
        ("?situation=held", ["held"]),
        ("?situation=retryable", ["failed"]),
        ("?situation=done", ["held", "failed", "done", "done"]),
        ("?situation=often", ["done"]),
        ("?situation=nonsense", ["stuck", "running"]),
        ("?path=/pay/stu", ["stuck"]),
        ("?path=pay", []),
        ("?method=POST&situation=held", ["held"]),
        ("?method=PUT", []),
        ("?mode__exact=lease&situation=held", ["held"]),
        ("?mode__exact=atomic", []),
        ("?situation=held&when=2001-01-01", []),
        ("?situation=held&when=2001-01-01T12", []),
        ("?situation=held&when=nonsense", ["held"]),
    ],
)
def test_the_filters(client, staff, records, query, keys):
    IdempotencyRecord.objects.filter(scope="user:2").update(replays=3)
    assert listed(client, query) == keys


@pytest.mark.parametrize("situation", ["live", "held", "retryable", "done"])
def test_every_record_is_in_one_of_the_days_and_in_one_of_its_hours(client, staff, records, situation):
    def choices(query):
        filters = client.get(LIST + query).context["cl"].filter_specs
        return [when for spec in filters if isinstance(spec, TimeFilter) for when, _title in spec.lookup_choices]

    everything = listed(client, f"?situation={situation}")
    days = choices(f"?situation={situation}")
    by_day = [key for day in reversed(days) for key in listed(client, f"?situation={situation}&when={day}")]
    assert sorted(by_day) == sorted(everything)
    hours = [hour for day in days for hour in choices(f"?situation={situation}&when={day}") if "T" in hour]
    by_hour = [key for hour in hours for key in listed(client, f"?situation={situation}&when={hour}")]
    assert sorted(by_hour) == sorted(everything)


def test_a_list_ends_where_it_says(client, staff, db, monkeypatch):
    monkeypatch.setattr(situations, "MOST", 3)
    for number in range(5):
        claimed(f"k{number}")
        IdempotencyRecord.objects.filter(key=f"k{number}").update(locked_until=ahead(number))
        ended(f"d{number}", Keep(StoredResponse(201)))
        IdempotencyRecord.objects.filter(key=f"d{number}").update(purge_at=ahead(24 * 3600 + number))
    assert listed(client) == ["k0", "k1", "k2"]
    assert listed(client, "?path=/pay/k4/") == []
    assert listed(client, "?situation=done") == ["d4", "d3", "d2"]
    assert listed(client, "?q=k4") == ["k4"]


def test_the_situations_say_how_many_there_are(client, staff, records):
    content = client.get(LIST).content.decode()
    for title in ("In flight (2)", "Lease ran out (1)", "Held for a decision (1)", "Failed, free to retry (1)"):
        assert title in content


@pytest.mark.parametrize("order", ["o=2", "o=-7", "o=3.-8"])
def test_a_list_can_be_put_in_another_order(client, staff, records, order):
    assert sorted(listed(client, f"?{order}")) == ["running", "stuck"]


@pytest.mark.row_locks
def test_the_list_says_whether_a_holder_in_atomic_mode_is_alive(client, staff, transactional_db, other_thread):
    policy = Policy()
    claim = engine.claim(Operation("user:1", "alive", b"f" * 32, "POST", "/pay/"), policy)
    engine.claim(Operation("user:1", "gone", b"f" * 32, "POST", "/pay/"), policy)
    with engine.execution(claim, policy) as run:
        shown = other_thread(lambda: client.get(LIST).content.decode())
        if connection.vendor == "postgresql":
            assert shown.count("a holder has its row locked") == shown.count("nobody has its row locked") == 1
            assert "a holder has its row locked" in other_thread(page, client, "alive")
        else:
            assert shown.count("locked_until is not renewed in atomic mode") == 2
        run.settle(Keep(StoredResponse(201)))


# --- The search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", ["done", '"done"', " done ", "done&situation=held&when=2001-01-01"])
def test_a_key_is_found_in_every_scope_as_the_client_sent_it(client, staff, records, term):
    assert listed(client, f"?q={term}") == ["done", "done"]


@pytest.mark.parametrize("term", ["%20", '""', "%00", "done%00"])
def test_a_search_for_nothing_lists_what_is_listed_without_one(client, staff, records, term):
    """And never the whole table."""
    assert listed(client, f"?q={term}") == listed(client)


@pytest.mark.parametrize("query", ["path=%00", "when=0001-01-01", "when=9999-12-31T23", "when=2026-01-01T00%00"])
def test_a_filter_that_can_not_be_meant_is_no_error(client, staff, records, query):
    assert client.get(f"{LIST}?situation=done&{query}").status_code in (200, 302)


@pytest.mark.parametrize("lookup", ["gt", "startswith", "contains", "regex", "isnull", "exact"])
def test_no_filter_asks_what_a_body_is(client, staff, records, lookup):
    before = client.get(f"{LIST}?situation=done&response_body__{lookup}=1")
    assert before.status_code in (302, 400)


@pytest.mark.parametrize("term", ["don", "one", "user:1", "DONE", "é", "x" * 300])
def test_anything_but_a_whole_key_finds_nothing(client, staff, records, term):
    assert listed(client, f"?q={term}") == []


def test_a_record_is_found_by_its_id(client, staff, records):
    for term in (str(record_id("user:2", "done")), record_id("user:2", "done").hex):
        response = client.get(f"{LIST}?q={term}")
        assert [record.scope for record in response.context["cl"].result_list] == ["user:2"]


def test_a_key_that_looks_like_an_id_is_found_as_a_key(client, staff, db):
    key = str(record_id("user:1", "some"))
    claimed("some")
    claimed(key)
    assert listed(client, f"?q={key}") == [key]


@pytest.mark.postgresql
@pytest.mark.plain_table
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


# --- A record --------------------------------------------------------------------------------------------------------


def test_a_body_is_shown_only_with_its_own_permission(client, staff, records):
    ended("text", Keep(StoredResponse(200, (("Content-Type", "text/html"),), b"<b>secret</b>")))
    without = page(client, "done"), page(client, "text")
    assert "X-Kept" in without[0]
    assert not [shown for shown in without if "secret" in shown or BODY[:4].hex(" ") in shown]
    allow(staff, "view_response_body")
    assert BODY.hex(" ") in page(client, "done")
    shown = page(client, "text")
    assert "&lt;b&gt;secret&lt;/b&gt;" in shown
    assert "<b>secret" not in shown


@pytest.mark.parametrize(
    ("body", "content_type"), [(rb'{"a": "\ud800"}', "application/json"), (b"+2AA-", "text/plain; charset=utf-7")]
)
def test_a_body_with_half_a_character_is_shown(client, superuser, db, body, content_type):
    ended("k", Keep(StoredResponse(200, (("Content-Type", content_type),), body)))
    page(client, "k")


@pytest.mark.cryptography
def test_an_encrypted_answer_is_shown_decrypted_with_that_permission_alone(client, staff, db, settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": [base64.b64encode(b"k" * 32).decode()]}
    ended("k", Keep(StoredResponse(200, (("X-Kept", "secret"), ("Content-Type", "text/plain")), b"hush")), encrypt=True)
    without = page(client, "k")
    assert "encrypted, with the body" in without
    assert not [word for word in ("secret", "hush") if word in without]
    allow(staff, "view_response_body")
    assert not [word for word in ("secret", "hush") if word not in page(client, "k")]


def test_the_timeline_tells_what_a_person_did_too(client, staff, records):
    allow(staff, "release_idempotencyrecord")
    act(client, "release", "held", note="asked the bank")
    shown = page(client, "held")
    assert "Released for retry. asked the bank" in shown
    assert "by staff" in shown


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


# --- What a person can do --------------------------------------------------------------------------------------------

GIVEN = {
    "release": {},
    "fail": {"status": 410, "detail": "lost"},
    "resolve": {"status": 201, "content_type": "application/json", "body": '{"id": 7}'},
    "extend": {"seconds": 600},
}
FITTING = {"release": "held", "fail": "failed", "resolve": "held", "extend": "running"}


def found(key, scope="user:1"):
    return IdempotencyRecord.objects.get(pk=record_id(scope, key))


def act(client, name, *keys, seen=None, follow=True, **given):
    """Confirm an action on records of these keys, as they are or as they were ``seen``; the page after it."""
    chosen = [f"{found(key).pk} {seen or version(found(key))}" for key in keys]
    return client.post(f"{LIST}intervene/{name}/", {"record": chosen, **GIVEN[name], **given}, follow=follow)


def told(response):
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("name", Act)
def test_each_action_needs_its_own_permission(client, staff, records, name):
    key = FITTING[name]
    before = IdempotencyRecord.objects.filter(key=key).values().get()
    allow(staff, *(f"{other}_idempotencyrecord" for other in Act if other != name))
    for answer in (act(client, name, key), client.get(f"{LIST}intervene/{name}/?id={found(key).pk}")):
        assert answer.status_code == 403
    assert f"intervene/{name}/" not in page(client, key)
    assert IdempotencyRecord.objects.filter(key=key).values().get() == before
    allow(staff, f"{name}_idempotencyrecord")
    assert f"intervene/{name}/" in page(client, key)
    assert "done for one record" in told(act(client, name, key))[0]
    assert IdempotencyRecord.objects.filter(key=key).values().get() != before


def test_without_seeing_records_nothing_can_be_done(client, staff, records):
    staff.user_permissions.set(Permission.objects.filter(codename__in=[f"{name}_idempotencyrecord" for name in Act]))
    assert act(client, "release", "held").status_code == 403


@pytest.mark.parametrize("name", Act)
def test_an_action_asks_first_and_then_leaves_an_entry_in_the_history(client, superuser, records, name):
    key = FITTING[name]
    before = found(key)
    asked = client.get(f"{LIST}intervene/{name}/?id={before.pk}").content.decode()
    assert f"{before.pk} {version(before)}" in asked
    assert version(found(key)) == version(before)
    assert not LogEntry.objects.exists()
    act(client, name, key, note="because")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.object_repr) == (superuser, str(before.pk), str(before))
    assert entry.get_change_message().endswith("because")
    assert "because" in client.get(f"{LIST}{before.pk}/history/").content.decode()


@pytest.mark.parametrize("name", ["release", "fail", "extend"])
def test_chosen_records_are_confirmed_together_and_each_has_its_entry(client, superuser, records, name):
    keys = ["running", "stuck"] if name == "extend" else ["held", "failed"]
    situation = "live" if name == "extend" else "done"
    chosen = {"action": f"{name}_records", "_selected_action": [str(found(key).pk) for key in keys]}
    asked = client.post(f"{LIST}?situation={situation}", chosen | {"select_across": "1"})
    assert {row[0].key for row in asked.context["rows"]} == set(keys)
    keys = [row[0].key for row in asked.context["rows"] if row[3] is None]
    act(client, name, *keys)
    assert {entry.object_id for entry in LogEntry.objects.all()} == {str(found(key).pk) for key in keys}


def test_of_several_records_each_refused_one_is_named_with_the_reason(client, superuser, records):
    after = act(client, "release", "held", "running", "done")
    assert found("held").held is False
    assert told(after) == [
        "Release for retry: done for one record.",
        "Release for retry: nothing was done to user:1 running. Its lease has not run out: its holder may be alive.",
        "Release for retry: nothing was done to user:1 done. It has its answer.",
    ]
    assert LogEntry.objects.count() == 1


def test_however_many_were_confirmed_all_are_done(client, superuser, db):
    many = [f"k{number}" for number in range(201)]
    for key in many:
        ended(key, Fail("crashed", held=True))
    assert told(act(client, "release", *many)) == ["Release for retry: done for 201 records."]
    assert not IdempotencyRecord.objects.filter(held=True).exists()
    asked = client.get(f"{LIST}intervene/fail/?{'&'.join(f'id={found(key).pk}' for key in many)}")
    assert len(asked.context["rows"]) == 201


def test_a_decision_on_what_has_changed_meanwhile_is_refused(client, superuser, records):
    seen = version(found("held"))
    act(client, "release", "held")
    after = act(client, "resolve", "held", seen=seen)
    assert "no longer as it was when you looked at it" in told(after)[0]
    assert found("held").response_status is None


def test_the_confirmation_leaves_out_what_will_be_refused(client, superuser, records):
    asked = client.get(f"{LIST}intervene/release/?id={found('running').pk}&id={found('held').pk}").content.decode()
    assert "Its lease has not run out" in asked
    assert f"{found('held').pk} {version(found('held'))}" in asked
    assert str(found("running").pk) + " " not in asked


@pytest.mark.row_locks
def test_a_live_holder_in_atomic_mode_is_not_to_be_chosen_and_not_to_be_had(client, superuser, transactional_db):
    policy = Policy()
    claim = engine.claim(Operation("user:1", "k", b"f" * 32, "POST", "/pay/"), policy)
    IdempotencyRecord.objects.update(locked_until=ahead(-60))
    holder = OtherThread()
    run = engine.execution(claim, policy)
    entered = holder(run.__enter__)
    try:
        if connection.vendor == "postgresql":
            assert "Its row is locked" in client.get(f"{LIST}intervene/release/?id={claim.id}").content.decode()
        assert "Its row is locked" in told(act(client, "release", "k"))[0]
    finally:
        entered.settle(Keep(StoredResponse(201)))
        holder(run.__exit__, None, None, None)
        holder.close()
    assert found("k").status == "completed"


def test_a_resolved_key_replays_what_was_typed(client, superuser, records):
    act(client, "resolve", "held", body='{\r\n"id": 7}', content_type="application/vnd.shop+json")
    replay = engine.claim(Operation("user:1", "held", b"f" * 32, "POST", "/pay/held/"), LEASE)
    assert replay == Replay(
        StoredResponse(201, (("Content-Type", "application/vnd.shop+json"),), b'{\n"id": 7}'),
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fail", {"status": 200}),
        ("fail", {"status": ""}),
        ("resolve", {"status": 600}),
        ("resolve", {"body": "{"}),
        ("resolve", {"status": 204}),
        ("resolve", {"status": 304}),
        ("resolve", {"content_type": "text"}),
        ("resolve", {"content_type": "text/plain\r\nSet-Cookie: a=b"}),
        ("extend", {"seconds": 0}),
        ("extend", {"seconds": 10**9}),
        ("release", {"note": "x" * 201}),
    ],
)
def test_what_can_not_be_meant_is_asked_again_and_changes_nothing(client, superuser, records, name, wrong):
    before = version(found(FITTING[name]))
    asked = act(client, name, FITTING[name], **wrong)
    assert asked.context["form"].errors
    assert version(found(FITTING[name])) == before


def test_each_answer_is_its_own(client, superuser, records):
    chosen = {"action": "resolve_records", "_selected_action": [str(found(key).pk) for key in ("held", "failed")]}
    after = client.post(f"{LIST}?situation=done", chosen, follow=True)
    assert "Choose one record" in told(after)[0]
    assert act(client, "resolve", "held", "failed").status_code == 404
    assert found("held").held


@pytest.mark.parametrize(
    "content_type", ["text/plain;\r\n charset=utf-8", "text/plain;\n charset=utf-8", "text/pläin", "text/plain\u0660"]
)
def test_a_content_type_that_no_server_could_send_is_asked_again(client, superuser, records, content_type):
    response = act(client, "resolve", "held", status=200, content_type=content_type, body="")
    assert response.status_code == 200
    assert found("held").held


def test_who_gives_an_answer_is_told_that_it_could_not_be_encrypted(client, superuser, records, settings, monkeypatch):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": [base64.b64encode(bytes(32)).decode()]}
    monkeypatch.setitem(sys.modules, "django_idempotency.encryption", None)
    after = act(client, "resolve", "held")
    assert "could not be encrypted" in told(after)[0]
    assert (found("held").held, LogEntry.objects.count()) == (True, 0)


@pytest.mark.parametrize("id", [str.upper, lambda id: id.replace("-", "")])
def test_an_id_may_be_written_otherwise(client, superuser, records, id):
    record = found("held")
    chosen = f"{id(str(record.pk))} {version(record)}"
    response = client.post(f"{LIST}intervene/release/", {"record": [chosen]}, follow=True)
    assert response.status_code == 200
    assert not found("held").held


def test_several_are_no_single_one(client, superuser, records):
    assert act(client, "release", "held", "stuck", single="1").status_code == 200


@pytest.mark.parametrize("query", ["?id=nonsense", f"?id={record_id('nobody', 'k')}", ""])
def test_an_action_on_nothing_is_not_found(client, superuser, records, query):
    assert client.get(f"{LIST}intervene/release/{query}").status_code == 404
    assert client.get(f"{LIST}intervene/nonsense/{query}").status_code == 404
    assert client.post(f"{LIST}intervene/release/", {"record": "nonsense x"}).status_code == 404


def test_one_goes_back_to_where_one_came_from(client, superuser, records):
    held = found("held").pk
    assert act(client, "extend", "running", follow=False, filters="situation=live").url == f"{LIST}?situation=live"
    assert act(client, "release", "held", follow=False, single="1").url == f"{LIST}{held}/change/"


@pytest.mark.django_db(transaction=True)
def test_actions_work_where_every_request_is_a_transaction(client, superuser, monkeypatch):
    ended("held", Fail("crashed", held=True))
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    act(client, "release", "held")
    assert not found("held").held


class LogApart:
    def db_for_write(self, model, **hints):
        return "log" if model is LogEntry else None

    db_for_read = db_for_write


@pytest.fixture
def log_apart(settings, transactional_db):
    """The admin's log is written through a connection of its own, as if it were in another database."""
    connections.settings["log"] = apart = {**connection.settings_dict}
    settings.DATABASE_ROUTERS = [LogApart()]
    yield apart
    connections["log"].close()
    del connections["log"], connections.settings["log"]


@pytest.mark.row_locks
def test_where_the_log_is_apart_and_can_not_be_written_nothing_is_done(client, superuser, log_apart):
    ended("held", Fail("crashed", held=True))
    log_apart["NAME"] = "nowhere at all"
    with pytest.raises(DatabaseError):
        act(client, "release", "held")
    assert found("held").held


@pytest.mark.row_locks
def test_where_the_log_is_apart_there_is_an_entry_before_there_is_a_commit(client, superuser, log_apart, proxy):
    ended("held", Fail("crashed", held=True))
    proxy.cut = Cut.BEFORE_COMMIT
    with pytest.raises(DatabaseError):
        act(client, "release", "held")
    assert (proxy.cuts, found("held").held, LogEntry.objects.count()) == (1, True, 1)


def test_the_permissions_are_those_of_the_documentation(db):
    documented = re.findall(r"^\| `django_idempotency\.(\w+)`", (DOCS / "admin.md").read_text(), re.MULTILINE)
    kinds = Permission.objects.filter(content_type__app_label="django_idempotency")
    assert sorted(documented) == sorted(kinds.values_list("codename", flat=True))
