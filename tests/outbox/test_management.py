"""Dead letters by command and in the admin, cleaning up, the relay's command, checks."""

from __future__ import annotations

import json
import uuid
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_idempotency.outbox import checks, maintenance
from django_idempotency.outbox.models import OutboxEvent, Relay, Status
from django_idempotency.outbox.publishing import publish
from django_idempotency.outbox.signals import event_dead_lettered, event_failed, event_published
from django_idempotency.stores.database import ahead

CHANGELIST = "/admin/django_idempotency_outbox/outboxevent/"


def told(*arguments, **options):
    out = StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue().strip()


@pytest.fixture
def dead(outbox, relay):
    """Three dead letters: their ids."""
    outbox(MAX_ATTEMPTS=1)
    with transaction.atomic():
        ids = [publish(topic, {}, key="k" if topic == "a" else "") for topic in "aab"]
    one = relay()
    one.publisher.refuses = lambda event: "it says no"
    while one.step() or OutboxEvent.objects.pending().filter(attempts=0).exclude(topic="a").exists():
        pass
    OutboxEvent.objects.pending().update(status=Status.DEAD, attempts=1, finished_at=ahead(0))
    one.lanes.leave()
    return ids


def test_dead_letters_are_listed(dead):
    assert [line.partition(" ")[0] for line in told("idempotency_outbox", "dead").splitlines()] == list(map(str, dead))
    (line,) = told("idempotency_outbox", "--json", "dead", "--topic", "b").splitlines()
    assert {"event_id": str(dead[2]), "error": "it says no"}.items() <= json.loads(line).items()
    assert told("idempotency_outbox", "status") == ("default: 0 pending; 0 failing, 3 dead, 0 live relays.")


@pytest.mark.parametrize(
    ("chosen", "count"), [(lambda ids: [str(ids[0])], 1), (lambda ids: ["--topic", "a"], 2), (lambda ids: ["--all"], 3)]
)
def test_requeued_dead_letters_are_sent(dead, relay, chosen, count):
    assert told("idempotency_outbox", "requeue", *chosen(dead)) == f"{count} requeued."
    assert relay().run_once() == count


def test_a_requeue_that_names_nothing_is_refused(dead):
    with pytest.raises(CommandError, match="--topic or --all"):
        told("idempotency_outbox", "requeue")


def test_requeued_events_go_before_the_later_ones_of_their_key(dead, relay):
    with transaction.atomic():
        publish("later", {}, key="k")
    maintenance.requeue(topic="a")
    one = relay()
    one.run_once()
    assert one.publisher.topics == ["a", "a", "later"]


def test_a_requeue_goes_by_the_routes_of_today(dead, outbox):
    receiver = {"BACKEND": "tests.outbox.receiver.Receiver"}
    outbox(PUBLISHERS={"default": receiver, "other": receiver}, ROUTES={"b": "other"})
    maintenance.requeue()
    assert list(OutboxEvent.objects.order_by("id").values_list("publisher", flat=True)) == ["default"] * 2 + ["other"]


def test_a_discarded_dead_letter_frees_its_key(dead, relay):
    with transaction.atomic():
        publish("later", {}, key="k")
    one = relay()
    one.run_once()
    assert one.publisher.topics == []
    assert told("idempotency_outbox", "discard", *map(str, dead[:2])) == "2 discarded."
    one.run_once()
    assert one.publisher.topics == ["later"]


def test_only_dead_letters_are_requeued_or_discarded(outbox):
    with transaction.atomic():
        id = publish("a", {})
    assert (maintenance.requeue([id]), maintenance.discard([id])) == (0, 0)
    assert OutboxEvent.objects.get().status == Status.PENDING


def test_cleanup_deletes_old_published_events_in_batches(outbox, monkeypatch):
    monkeypatch.setattr(maintenance, "CLEANUP_BATCH", 2)
    outbox(RETENTION=60)
    with transaction.atomic():
        for _ in range(7):
            publish("a", {})
    old = OutboxEvent.objects.order_by("id")
    OutboxEvent.objects.filter(pk__in=[event.pk for event in old[:4]]).update(
        status=Status.PUBLISHED, finished_at=ahead(-100)
    )
    OutboxEvent.objects.filter(pk=old[4].pk).update(status=Status.PUBLISHED, finished_at=ahead(-10))
    OutboxEvent.objects.filter(pk=old[5].pk).update(status=Status.DEAD, attempts=1, finished_at=ahead(-1000))
    with CaptureQueriesContext(connection) as queries:
        assert told("idempotency_outbox", "cleanup") == "4 deleted; nothing is left."
    assert len([query for query in queries if query["sql"].startswith("DELETE")]) == 2
    assert OutboxEvent.objects.count() == 3


def test_signals_tell_of_what_stands(outbox, relay):
    outbox(MAX_ATTEMPTS=2)
    heard = []

    def hear(signal, sender, event, **named):
        name = {event_published: "published", event_failed: "failed", event_dead_lettered: "dead"}[signal]
        named.pop("signal", None)
        heard.append((name, sender, event.topic, named, OutboxEvent.objects.filter(event_id=event.id).count()))

    with transaction.atomic():
        publish("good", {})
        publish("bad", {})
    for signal in (event_published, event_failed, event_dead_lettered):
        signal.connect(hear)
    try:
        one = relay()
        one.publisher.refuses = lambda event: "no" if event.topic == "bad" else None
        while one.step() or OutboxEvent.objects.pending().exists():
            pass
    finally:
        for signal in (event_published, event_failed, event_dead_lettered):
            signal.disconnect(hear)
    assert heard == [
        ("published", "default", "good", {}, 0),
        ("failed", "default", "bad", {"reason": "no", "attempts": 1}, 1),
        ("dead", "default", "bad", {"reason": "no", "attempts": 2}, 1),
    ]


# --- The relay's command ---------------------------------------------------------------------------------------------


def test_the_relay_publishes_once_and_ends(outbox):
    with transaction.atomic():
        publish("a", {})
    assert told("idempotency_relay", "--once") == "default: 1 published"
    assert not Relay.objects.exists()


def test_the_relay_needs_somewhere_to_publish_to(outbox):
    outbox(PUBLISHERS={})
    with pytest.raises(CommandError, match="has no PUBLISHERS"):
        told("idempotency_relay", "--once")
    outbox()
    with pytest.raises(CommandError, match="PUBLISHERS has no 'defualt': did you mean 'default'"):
        told("idempotency_relay", "--once", "--publisher", "defualt")


def test_health_asks_for_a_live_relay_on_this_host(relay):
    with pytest.raises(CommandError, match="No live relay on this host for default"):
        told("idempotency_relay", "--health")
    one = relay()
    one.lanes.join()
    assert told("idempotency_relay", "--health") == "alive: default"
    Relay.objects.update(lease_until=ahead(-1))
    with pytest.raises(CommandError):
        told("idempotency_relay", "--health")


# --- Checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, []),
        ({"BATCH": 0}, ["E060"]),
        ({"PUBLISHERS": {"default": {"BACKEND": "nowhere.Publisher"}}}, ["E061"]),
        ({"PUBLISHERS": {"default": {"BACKEND": "datetime.datetime", "OPTIONS": {"year": 1}}}}, ["E061"]),
        ({"PUBLISHERS": {}}, ["W062"]),
    ],
)
def test_checks_of_the_options(outbox, options, ids):
    outbox(**options)
    assert [message.id.partition(".")[2] for message in checks.check_options(None)] == ids


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"BATCH": 0}, 'IDEMPOTENCY["OUTBOX"]["BATCH"] is 0; it must be a number from 1 to 100000.'),
        (
            {"RETENTION": "1d"},
            """IDEMPOTENCY["OUTBOX"]["RETENTION"] is '1d'; it must be a number of seconds from 0.001""",
        ),
        ({"ROUTES": {"a.*": "defualt"}}, "OUTBOX: ROUTES sends 'a.*' to 'defualt', which is not in PUBLISHERS"),
    ],
)
def test_a_wrong_option_is_called_as_in_the_settings(outbox, options, sentence):
    outbox(**options)
    (message,) = checks.check_options(None)
    assert message.msg.startswith(sentence)


def test_the_status_says_why_events_fail(outbox, relay):
    with transaction.atomic():
        publish("a", {})
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    one = relay()
    one.publisher.refuses = lambda event: "it says no"
    one.step()
    one.lanes.leave()
    assert told("idempotency_outbox", "status").endswith(
        "1 failing, 0 dead, 0 live relays. The first failing event: it says no"
    )
    assert json.loads(told("idempotency_outbox", "--json", "status"))["error"] == "it says no"


def test_a_check_tells_of_events_that_wait_for_long(outbox):
    with transaction.atomic():
        publish("a", {})
    assert checks.check_backlog(None, ["default"]) == []
    OutboxEvent.objects.update(created_at=ahead(-4000))
    assert [message.id for message in checks.check_backlog(None, ["default"])] == ["django_idempotency.W063"]
    assert checks.check_backlog(None, None) == []


# --- The admin -------------------------------------------------------------------------------------------------------


def test_the_admin_lists_dead_letters_first(dead, admin_client):
    with transaction.atomic():
        publish("waiting", {}, headers={"tenant": "a"})
    OutboxEvent.objects.filter(event_id=dead[1]).update(status=Status.PENDING, finished_at=None)
    results = admin_client.get(CHANGELIST).context["cl"].result_list
    assert [(event.status, event.attempts) for event in results] == [
        ("dead", 1),
        ("dead", 1),
        ("pending", 1),
        ("pending", 0),
    ]


def test_the_admin_requeues_and_discards_what_was_ticked(dead, admin_client):
    keys = dict(OutboxEvent.objects.values_list("event_id", "pk"))
    for action, id in (("requeue", dead[0]), ("discard", dead[2])):
        admin_client.post(CHANGELIST, {"action": action, "_selected_action": [keys[id]]})
    assert OutboxEvent.objects.get(event_id=dead[0]).status == Status.PENDING
    assert OutboxEvent.objects.get(event_id=dead[1]).status == Status.DEAD
    assert not OutboxEvent.objects.filter(event_id=dead[2]).exists()


def test_the_admin_acts_only_for_those_who_may(dead, client, django_user_model):
    from django.contrib.auth.models import Permission

    user = django_user_model.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_outboxevent"))
    client.force_login(user)
    ticked = list(OutboxEvent.objects.values_list("pk", flat=True))
    assert client.get(CHANGELIST).status_code == 200
    for action in ("requeue", "discard"):
        client.post(CHANGELIST, {"action": action, "_selected_action": ticked})
    assert OutboxEvent.objects.dead().count() == 3


def test_the_admin_finds_an_event_by_its_id_or_key_and_shows_it(dead, admin_client):
    for term, found in ((str(dead[2]), 1), ("k", 2), (str(uuid.uuid4()), 0)):
        assert len(admin_client.get(CHANGELIST, {"q": term}).context["cl"].result_list) == found
    page = admin_client.get(f"{CHANGELIST}{OutboxEvent.objects.get(event_id=dead[2]).pk}/change/")
    assert str(dead[2]) in page.content.decode()
    assert admin_client.get("/admin/django_idempotency_outbox/relay/").status_code == 200


# --- Celery beat -----------------------------------------------------------------------------------------------------


@pytest.mark.celery
def test_beats_task_cleans_up(outbox):
    from django_idempotency.outbox import tasks

    with transaction.atomic():
        publish("a", {})
    OutboxEvent.objects.update(status=Status.PUBLISHED, finished_at=ahead(-10))
    (entry,) = tasks.BEAT_SCHEDULE.values()
    assert entry["task"] == tasks.cleanup.name
    assert tasks.cleanup(**entry["kwargs"]) == {"rows": 1, "finished": True}
