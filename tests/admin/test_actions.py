"""What an operator can do, who may, and what is refused."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import DatabaseError, connection
from django.utils.html import strip_tags

from django_idempotency import engine
from django_idempotency.maintenance.decisions import HARMLESS, Act, version
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Fail, Operation, Replay, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from django_idempotency.values.scopes import user_scope
from tests.admin.pages import GIVEN, LEASE, LIST, act, allow, ended, found, page
from tests.support.aliases import another_alias
from tests.support.proxy import Cut
from tests.support.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"


FITTING = {
    "allow_retry": "on_hold",
    "fail": "failed",
    "resolve": "on_hold",
    "extend": "running",
}


def told(response):
    return [strip_tags(str(message)) for message in response.context["messages"]]


@pytest.mark.parametrize("name", Act)
def test_each_action_needs_its_own_permission(client, staff, records, name):
    key = FITTING[name]
    before = IdempotencyRecord.objects.filter(key=key).values().get()
    allow(staff, *(f"{other}_idempotencyrecord" for other in Act if other != name))
    for answer in (
        act(client, name, key),
        client.get(f"{LIST}intervene/{name}/?id={found(key).pk}"),
    ):
        assert answer.status_code == 403
    assert f"intervene/{name}/" not in page(client, key)
    assert IdempotencyRecord.objects.filter(key=key).values().get() == before
    allow(staff, f"{name}_idempotencyrecord")
    assert f"intervene/{name}/" in page(client, key)
    assert "done for one record" in told(act(client, name, key))[0]
    assert IdempotencyRecord.objects.filter(key=key).values().get() != before


def test_without_seeing_records_nothing_can_be_done(client, staff, records):
    staff.user_permissions.set(
        Permission.objects.filter(
            codename__in=[f"{name}_idempotencyrecord" for name in Act]
        )
    )
    assert act(client, "allow_retry", "on_hold").status_code == 403


@pytest.mark.parametrize("name", Act)
def test_an_action_asks_first_and_then_leaves_an_entry_in_the_history(
    client, superuser, records, name
):
    key = FITTING[name]
    before = found(key)
    asked = client.get(f"{LIST}intervene/{name}/?id={before.pk}").content.decode()
    assert f"{before.pk} {version(before)}" in asked
    assert version(found(key)) == version(before)
    assert not LogEntry.objects.exists()
    act(client, name, key, note="because")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.object_repr) == (
        superuser,
        str(before.pk),
        str(before.pk),
    )
    assert entry.get_change_message().endswith("because")
    assert "because" in client.get(f"{LIST}{before.pk}/history/").content.decode()


@pytest.mark.parametrize("name", Act)
def test_a_required_note_is_asked_for(client, superuser, records, settings, name):
    settings.IDEMPOTENCY = {"DECISIONS": ["note"]}
    before = version(found(FITTING[name]))
    assert "note" in act(client, name, FITTING[name], note=" ").context["form"].errors
    assert version(found(FITTING[name])) == before
    assert (
        "done for one record"
        in told(act(client, name, FITTING[name], note="because"))[0]
    )


@pytest.mark.parametrize("name", Act)
def test_an_operator_is_refused_a_key_of_their_own(client, superuser, records, name):
    key = FITTING[name]
    assert f"intervene/{name}/" in page(client, key)
    IdempotencyRecord.objects.filter(key=key).update(scope=user_scope(superuser, None))
    record = IdempotencyRecord.objects.get(key=key)
    assert (
        f"intervene/{name}/"
        not in client.get(f"{LIST}{record.pk}/change/").content.decode()
    )
    assert (
        "The key is your own"
        in client.get(f"{LIST}intervene/{name}/?id={record.pk}").content.decode()
    )
    chosen = {"record": [f"{record.pk} {version(record)}"], **GIVEN[name]}
    assert (
        "The key is your own"
        in told(client.post(f"{LIST}intervene/{name}/", chosen, follow=True))[0]
    )
    assert (
        version(IdempotencyRecord.objects.get(key=key)),
        LogEntry.objects.count(),
    ) == (version(record), 0)


@pytest.mark.parametrize("name", ["allow_retry", "fail", "extend"])
def test_chosen_records_are_confirmed_together_and_each_has_its_entry(
    client, superuser, records, name
):
    keys = ["running", "stuck"] if name == "extend" else ["on_hold", "failed"]
    situation = "live" if name == "extend" else "done"
    chosen = {
        "action": f"{name}_records",
        "_selected_action": [str(found(key).pk) for key in keys],
    }
    asked = client.post(
        f"{LIST}?situation={situation}", chosen | {"select_across": "1"}
    )
    assert {row[0].key for row in asked.context["rows"]} == set(keys)
    keys = [row[0].key for row in asked.context["rows"] if row[3] is None]
    act(client, name, *keys)
    assert {entry.object_id for entry in LogEntry.objects.all()} == {
        str(found(key).pk) for key in keys
    }


def test_of_several_records_each_refused_one_is_named_with_the_reason(
    client, superuser, records
):
    after = act(client, "allow_retry", "on_hold", "running", "done")
    assert found("on_hold").on_hold is False
    assert told(after) == [
        "Allow a retry: done for one record.",
        (
            "Allow a retry: nothing was done to user:1 running. Its lease has not run"
            " out: its owner may be alive."
        ),
        "Allow a retry: nothing was done to user:1 done. It already has its response.",
    ]
    assert LogEntry.objects.count() == 1


def test_however_many_were_confirmed_all_are_done(client, superuser, db):
    many = [f"k{number}" for number in range(201)]
    for key in many:
        ended(key, Fail("crashed", on_hold=True))
    assert told(act(client, "allow_retry", *many)) == [
        "Allow a retry: done for 201 records."
    ]
    assert not IdempotencyRecord.objects.filter(on_hold=True).exists()
    asked = client.get(
        f"{LIST}intervene/fail/?{'&'.join(f'id={found(key).pk}' for key in many)}"
    )
    assert len(asked.context["rows"]) == 201


def test_a_decision_on_what_has_changed_meanwhile_is_refused(
    client, superuser, records
):
    seen = version(found("on_hold"))
    act(client, "allow_retry", "on_hold")
    after = act(client, "resolve", "on_hold", seen=seen)
    assert "It has changed since you last saw it" in told(after)[0]
    assert found("on_hold").response_status is None


def test_the_confirmation_leaves_out_what_will_be_refused(client, superuser, records):
    asked = client.get(
        f"{LIST}intervene/allow_retry/?id={found('running').pk}&id={found('on_hold').pk}"
    ).content.decode()
    assert "Its lease has not run out" in asked
    assert f"{found('on_hold').pk} {version(found('on_hold'))}" in asked
    assert str(found("running").pk) + " " not in asked


def test_a_confirmation_of_a_lapsed_lease_has_it_watched(
    client, superuser, transactional_db
):
    """Without a retry and without a reaper, too, an operator gets to decide about a key
    whose owner is gone.
    """
    policy = Policy(mode=Lease(seconds=1))
    engine.claim(Operation("user:1", "lapsed", b"f" * 32, "POST", "/pay/"), policy)
    IdempotencyRecord.objects.update(locked_at=ahead(-60), locked_until=ahead(-59))
    link = f"intervene/allow_retry/?id={found('lapsed').pk}"
    assert link in unescape(page(client, "lapsed"))
    assert (
        "its owner may still renew it" in client.get(f"{LIST}{link}").content.decode()
    )
    eventually(
        lambda: "may still renew it" not in client.get(f"{LIST}{link}").content.decode()
    )
    assert "done for one record" in told(act(client, "allow_retry", "lapsed"))[0]


def test_a_resolved_key_replays_what_was_typed(client, superuser, records):
    act(
        client,
        "resolve",
        "on_hold",
        body='{\r\n"id": 7}',
        content_type="application/vnd.shop+json",
    )
    replay = engine.claim(
        Operation("user:1", "on_hold", b"f" * 32, "POST", "/pay/held/"), LEASE
    )
    assert replay == Replay(
        StoredResponse(
            201,
            (("Content-Type", "application/vnd.shop+json"), *HARMLESS),
            b'{\n"id": 7}',
        )
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
        ("resolve", {"content_type": "text/html", "body": "<script>"}),
        ("resolve", {"content_type": "text/plain\r\nSet-Cookie: a=b", "body": ""}),
        ("resolve", {"content_type": "text/plain;\r\n charset=utf-8", "body": ""}),
        ("resolve", {"content_type": "text/plain;\n charset=utf-8", "body": ""}),
        ("resolve", {"content_type": "text/pläin", "body": ""}),
        ("resolve", {"content_type": "text/plain\u0660", "body": ""}),
        ("extend", {"seconds": 0}),
        ("extend", {"seconds": 10**9}),
        ("allow_retry", {"note": "x" * 201}),
    ],
)
def test_an_invalid_form_is_shown_again_and_changes_nothing(
    client, superuser, records, name, wrong
):
    before = version(found(FITTING[name]))
    asked = act(client, name, FITTING[name], **wrong)
    assert asked.context["form"].errors
    assert version(found(FITTING[name])) == before


def test_only_one_record_at_a_time_can_be_given_a_response(client, superuser, records):
    chosen = {
        "action": "resolve_records",
        "_selected_action": [str(found(key).pk) for key in ("on_hold", "failed")],
    }
    after = client.post(f"{LIST}?situation=done", chosen, follow=True)
    assert "Choose one record" in told(after)[0]
    assert act(client, "resolve", "on_hold", "failed").status_code == 404
    assert found("on_hold").on_hold


@pytest.mark.parametrize(
    "query", ["?id=nonsense", f"?id={record_id('nobody', 'k')}", ""]
)
def test_an_action_on_nothing_is_not_found(client, superuser, records, query):
    assert client.get(f"{LIST}intervene/allow_retry/{query}").status_code == 404
    assert client.get(f"{LIST}intervene/nonsense/{query}").status_code == 404
    assert (
        client.post(
            f"{LIST}intervene/allow_retry/", {"record": "nonsense x"}
        ).status_code
        == 404
    )


def test_an_action_leads_back_to_the_list_that_it_was_chosen_in(
    client, superuser, records
):
    (result,) = (
        client.get(f"{LIST}?situation=on_hold&mode__exact=lease")
        .context["cl"]
        .result_list
    )
    filters = {"_changelist_filters": "situation=on_hold&mode__exact=lease"}
    html = client.get(f"{LIST}{result.pk}/change/", filters).content.decode()
    (link,) = [
        unescape(link)
        for link in re.findall(r'href="([^"]+)"', html)
        if "/allow_retry/" in link
    ]
    confirm = unescape(client.get(link).content.decode())
    (kept,) = re.findall(r'name="filters" value="([^"]*)"', confirm)
    after = act(client, "allow_retry", "on_hold", follow=False, filters=kept)
    assert after.url == f"{LIST}?situation=on_hold&mode__exact=lease"
    assert f'href="{after.url}"' in confirm  # "No, take me back"


def test_the_confirmation_tells_since_when_and_why(client, superuser, records):
    IdempotencyRecord.objects.filter(key="on_hold").update(updated_at=ahead(-2 * 3600))
    query = "&".join(f"id={found(key).pk}" for key in ("on_hold", "stuck", "failed"))
    text = strip_tags(
        client.get(f"{LIST}intervene/allow_retry/?{query}").content.decode()
    )
    assert (
        "On hold for 2 h: it is not known whether the operation took place (its lease"
        " ran out)" in text
    )
    assert "Stuck: in flight for 3 h 7 min, and its lease ran out 3 h 7 min ago" in text
    assert re.search(r"the last run failed \d+ s ago \(ValueError\)", text)


@pytest.mark.usefixtures("transactional_db")
def test_actions_work_where_every_request_is_a_transaction(
    client, superuser, monkeypatch
):
    ended("on_hold", Fail("crashed", on_hold=True))
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    act(client, "allow_retry", "on_hold")
    assert not found("on_hold").on_hold


class LogApart:
    def db_for_write(self, model, **hints):
        return "log" if model is LogEntry else None

    db_for_read = db_for_write


@pytest.fixture
def log_apart(settings, transactional_db):
    """The admin's log is written through a connection of its own, as if it were in
    another database.
    """
    with another_alias("log"):
        settings.DATABASE_ROUTERS = [LogApart()]
        yield


@pytest.mark.row_locks
@pytest.mark.usefixtures("log_apart")
def test_a_separate_log_is_written_before_the_commit(client, superuser, proxy):
    ended("on_hold", Fail("crashed", on_hold=True))
    proxy.cut = Cut.BEFORE_COMMIT
    with pytest.raises(DatabaseError):
        act(client, "allow_retry", "on_hold")
    assert (proxy.cuts, found("on_hold").on_hold, LogEntry.objects.count()) == (
        1,
        True,
        1,
    )


def test_the_permissions_are_those_of_the_documentation(db):
    documented = re.findall(
        r"^\| `django_idempotency\.(\w+)`",
        (DOCS / "admin.md").read_text(),
        re.MULTILINE,
    )
    kinds = Permission.objects.filter(content_type__app_label="django_idempotency")
    assert sorted(documented) == sorted(kinds.values_list("codename", flat=True))
