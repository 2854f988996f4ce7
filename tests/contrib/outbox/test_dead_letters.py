"""Dead letters, by command and in the admin: who may do what, who did it, and who has
seen what is in them.
"""

from __future__ import annotations

import base64
import json
import uuid

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.core.management import CommandError
from django.db import transaction

from django_idempotency.contrib.outbox import admin as outbox_admin
from django_idempotency.contrib.outbox.maintenance import Act, dead_letters, decide
from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.contrib.outbox.publishing import InvalidEvent, publish
from django_idempotency.values.policy import Body
from tests.contrib.outbox.conftest import CARD, RECEIVER, receiver
from tests.contrib.outbox.events import publish_all, told, waiting
from tests.support.sql import run_sql
from tests.support.statements import explaining, nodes

LIST = "/admin/django_idempotency_outbox/outboxevent/"
KEY = {"ENCRYPTION_KEYS": [base64.b64encode(bytes(range(32))).decode()]}


@pytest.fixture
def anna(django_user_model):
    return django_user_model.objects.create_superuser("anna")


@pytest.fixture
def viewer(client, django_user_model, outbox):
    """A member of staff who may see events."""
    user = django_user_model.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_outboxevent"))
    client.force_login(user)
    return user


@pytest.fixture
def state(settings):
    """``state(DECISIONS=["note"])`` states settings beside those of the outbox."""

    def state(**named):
        settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, **named}

    return state


def run(action, *arguments, by="anna"):
    return told("idempotency_outbox", action, *arguments, f"--by={by}")


def entries():
    return list(
        LogEntry.objects.order_by("pk").values_list(
            "user__username", "object_id", "change_message"
        )
    )


def test_dead_letters_are_listed(dead):
    assert [
        line.partition(" ")[0]
        for line in told("idempotency_outbox", "dead").splitlines()
    ] == list(map(str, dead))
    (line,) = told("idempotency_outbox", "dead", "--topic", "b", "--json").splitlines()
    assert {"event_id": str(dead[2]), "error": "it says no"}.items() <= json.loads(
        line
    ).items()
    assert (
        told("idempotency_outbox", "status")
        == "default: 0 pending; 0 failing, 3 dead, 0 live relays."
    )


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (lambda ids: [str(ids[0])], 1),
        (lambda ids: ["--topic", "a"], 2),
        (lambda ids: ["--all"], 3),
    ],
)
def test_requeued_dead_letters_are_sent(dead, anna, relay, chosen, count):
    assert run("requeue", *chosen(dead)) == f"{count} requeued."
    assert relay().run_once() == count


def test_a_requeue_that_names_nothing_is_refused(dead):
    with pytest.raises(CommandError, match="--topic or --all"):
        run("requeue")


def test_a_discarded_dead_letter_frees_its_key(dead, anna, relay):
    publish_all("later/k")
    one = relay()
    one.run_once()
    assert receiver(one).topics == []
    assert run("discard", *map(str, dead[:2])) == "2 discarded."
    one.run_once()
    assert receiver(one).topics == ["later"]


def test_requeued_events_go_before_the_later_ones_of_their_key(dead, relay):
    publish_all("later/k")
    decide(Act.REQUEUE, dead_letters(topic="a"))
    one = relay()
    one.run_once()
    assert receiver(one).topics == ["a", "a", "later"]


def test_a_requeue_goes_by_the_routes_of_today(dead, outbox):
    outbox(
        PUBLISHERS={alias: {"BACKEND": RECEIVER} for alias in ("default", "other")},
        ROUTES={"b": "other"},
    )
    decide(Act.REQUEUE, dead_letters())
    assert list(
        OutboxEvent.objects.order_by("id").values_list("publisher", flat=True)
    ) == ["default"] * 2 + ["other"]


def test_only_dead_letters_are_decided_about(outbox):
    (id,) = publish_all("a")
    assert [decide(act, dead_letters([id]))[0] for act in Act] == [0, 0]
    assert OutboxEvent.objects.get().status == Status.PENDING


def test_a_decision_is_in_the_history_of_each_event(dead, anna):
    pks = dict(OutboxEvent.objects.values_list("event_id", "pk"))
    run("requeue", "--topic", "a", "--note=the broker is back")
    run("discard", str(dead[2]))
    assert entries() == [
        ("anna", str(pks[dead[0]]), "Requeued. the broker is back"),
        ("anna", str(pks[dead[1]]), "Requeued. the broker is back"),
        ("anna", str(pks[dead[2]]), "Discarded."),
    ]


@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_a_user_who_may_not_decide_is_refused(dead, viewer, action):
    with pytest.raises(CommandError, match="does not have the permission"):
        run(action, str(dead[0]), by="viewer")
    with pytest.raises(CommandError, match="Pass --by"):
        told("idempotency_outbox", action, str(dead[0]))
    assert (dead_letters().count(), entries()) == (3, [])


@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_a_note_is_asked_for_where_the_settings_require_it(dead, anna, state, action):
    state(DECISIONS=["note"])
    with pytest.raises(CommandError, match="A note that says why is required"):
        run(action, str(dead[0]))
    assert (dead_letters().count(), entries()) == (3, [])
    run(action, str(dead[0]), "--note=why")
    assert dead_letters().count() == 2


@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_a_second_user_decides_the_same_where_the_settings_require_it(
    dead, anna, state, django_user_model, action
):
    django_user_model.objects.create_superuser("bob")
    state(DECISIONS=["second_operator"])
    for _ in range(2):
        with pytest.raises(CommandError, match="It is now proposed"):
            run(action, str(dead[0]))
    other = {"requeue": "discard", "discard": "requeue"}[action]
    with pytest.raises(CommandError, match="It is now proposed"):
        run(other, str(dead[0]), by="bob")
    run(action, str(dead[0]), by="bob")
    assert dead_letters().count() == 2


def test_a_proposal_ends_when_the_event_is_requeued_and_given_up_again(
    dead, anna, state, django_user_model, relay
):
    bob = django_user_model.objects.create_superuser("bob")
    state(DECISIONS=["second_operator"])
    decide(Act.DISCARD, dead_letters(topic="b"), by=anna)
    state(DECISIONS=[])
    decide(Act.REQUEUE, dead_letters(topic="b"), by=bob)
    one = relay()
    receiver(one).refuses, receiver(one).permanent = lambda event: "never", True
    one.run_once()
    state(DECISIONS=["second_operator"])
    assert decide(Act.DISCARD, dead_letters(topic="b"), by=bob)[0] == 0


def ask(client, action, *ids, situation="dead"):
    ticked = list(
        OutboxEvent.objects.filter(event_id__in=ids).values_list("pk", flat=True)
    )
    url = f"{LIST}?situation={situation}"
    return client.post(url, {"action": action, "_selected_action": ticked})


def confirm(client, asked, **given):
    """Send the form of a confirmation page as it is, with ``given``."""
    rows = asked.context["rows"]
    form = {
        "action": asked.context["form"].act,
        "confirmed": "1",
        "_selected_action": [row[0].pk for row in rows],
        "record": [f"{row[0].pk} {row[1]}" for row in rows if row[3] is None],
    }
    for name in form:
        assert f'name="{name}"' in asked.content.decode()
    return client.post(LIST, form | given, follow=True)


def test_the_admin_lists_dead_letters_first_and_others_by_situation(dead, admin_client):
    with transaction.atomic():
        publish("waiting", {}, headers={"tenant": "a"})
    OutboxEvent.objects.filter(event_id=dead[1]).update(
        status=Status.PENDING, given_up_at=None
    )
    for situation, events in {
        "": [("dead", 1)] * 2,
        "?situation=failing": [("pending", 1)],
        "?situation=waiting": [("pending", 0)],
        "?situation=dead&publisher=default": [("dead", 1)] * 2,
        "?situation=dead&publisher=other": [],
    }.items():
        results = admin_client.get(LIST + situation).context["cl"].result_list
        assert [(event.status, event.attempts) for event in results] == events


@pytest.mark.postgresql
@pytest.mark.parametrize("query", ["", "?situation=failing", "?situation=waiting"])
def test_a_list_reads_as_many_events_as_it_says(
    outbox, admin_client, monkeypatch, query
):
    monkeypatch.setattr(outbox_admin, "MOST", 500)
    waiting(10_000, "0", attempts=0)
    run_sql(f"ANALYZE {OutboxEvent._meta.db_table}")
    with explaining(OutboxEvent._meta.db_table, only=("SELECT",)) as plans:
        admin_client.get(LIST + query)
    read = [
        node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        for plan in plans
        for node in nodes(plan)
    ]
    assert max(read) <= 500


def test_the_admin_finds_an_event_by_its_id_or_key(dead, admin_client):
    for term, found in ((str(dead[2]), 1), ("k", 2), (str(uuid.uuid4()), 0)):
        assert (
            len(admin_client.get(LIST, {"q": term}).context["cl"].result_list) == found
        )


@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_the_admin_asks_for_confirmation_and_a_note(dead, admin_client, state, action):
    state(DECISIONS=["note"])
    asked = ask(admin_client, action, *dead[:2])
    assert "it says no" in asked.content.decode()
    again = confirm(admin_client, asked)
    assert (dead_letters().count(), again.context["form"].errors.keys()) == (
        3,
        {"note"},
    )
    after = confirm(admin_client, again, note="checked")
    assert "done for 2 events" in after.content.decode()
    assert dead_letters().count() == 1
    assert {(user, entry.endswith(". checked")) for user, _id, entry in entries()} == {
        ("admin", True)
    }


def test_the_admin_leaves_an_event_alone_that_was_given_up_again_since_it_was_seen(
    dead, admin_client
):
    asked = ask(admin_client, "discard", dead[0])
    OutboxEvent.objects.filter(event_id=dead[0]).update(attempts=2)
    assert (
        "It has changed since you last saw it"
        in confirm(admin_client, asked).content.decode()
    )
    assert (dead_letters().count(), entries()) == (3, [])


def test_the_admin_says_which_events_are_not_dead_letters(dead, admin_client):
    (id,) = publish_all("waiting")
    asked = ask(admin_client, "discard", id, situation="waiting")
    assert "It is not a dead letter" in asked.content.decode()
    assert not asked.context["possible"]


def test_the_admin_acts_only_for_those_who_may(dead, viewer, client):
    for action in ("requeue", "discard"):
        ask(client, action, *dead)
        client.post(
            LIST,
            {
                "action": action,
                "confirmed": "1",
                "_selected_action": [1],
                "record": ["1 1"],
            },
        )
    assert dead_letters().count() == 3


def test_content_is_shown_only_with_permission_and_leaves_an_entry(
    dead, viewer, client
):
    event = OutboxEvent.objects.get(event_id=dead[2])
    page = f"{LIST}{event.pk}/change/"
    hidden = client.get(page).content.decode()
    assert (str(dead[2]) in hidden, CARD in hidden, entries()) == (True, False, [])
    viewer.user_permissions.add(
        Permission.objects.get(codename="view_response_idempotencyrecord")
    )
    assert CARD in client.get(page).content.decode()
    assert entries() == [("viewer", str(event.pk), "Payload viewed.")]


@pytest.mark.parametrize("lookup", ["payload__contains", "headers__tenant"])
def test_content_can_not_be_searched_bit_by_bit(viewer, client, lookup):
    assert client.get(LIST, {lookup: "4242"}).status_code == 400


def test_the_strip_counts_dead_letters(dead, admin_client):
    pages = ("/admin/django_idempotency/idempotencyrecord/", LIST)
    assert all(
        "3 dead letters" in admin_client.get(page).content.decode() for page in pages
    )
    decide(Act.DISCARD, dead_letters())
    assert not any(
        "dead letters</p>" in admin_client.get(page).content.decode() for page in pages
    )


@pytest.fixture
def encrypted(outbox, state):
    """An event that was published where the settings encrypt responses."""
    state(BODY=Body(encrypt=True), **KEY)
    with transaction.atomic():
        publish("a", {"card": "4242"}, headers={"tenant": "acme"})
    return OutboxEvent.objects.get()


def test_content_is_stored_encrypted_and_shown_and_sent_as_it_was(
    encrypted, relay, admin_client
):
    assert b"4242" not in bytes(encrypted.payload)
    assert "acme" not in str(encrypted.headers)
    page = admin_client.get(f"{LIST}{encrypted.pk}/change/").content.decode()
    assert ("4242" in page, "acme" in page) == (True, True)
    one = relay()
    one.run_once()
    (sent,) = receiver(one).events
    assert (sent.payload, sent.headers) == (b'{"card": "4242"}', {"tenant": "acme"})


@pytest.mark.parametrize("encrypt", [True, "require"])
def test_an_event_that_can_not_be_encrypted_is_refused(outbox, state, encrypt):
    state(BODY=Body(encrypt=encrypt))
    with pytest.raises(InvalidEvent, match="can't be encrypted"), transaction.atomic():
        publish("a", {"card": "4242"})
    assert not OutboxEvent.objects.exists()


def test_an_event_whose_encryption_key_is_lost_waits_alone(encrypted, state, relay):
    state(BODY=Body(), ENCRYPTION_KEYS=[base64.b64encode(bytes(32)).decode()])
    publish_all("b")
    one = relay()
    one.step()
    assert receiver(one).topics == ["b"]
    assert "could not be decrypted" in OutboxEvent.objects.get().error
