"""Cleaning up, signals, the relay's command, figures, checks."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError
from django.db import connection

from django_idempotency.contrib.outbox import maintenance
from django_idempotency.contrib.outbox.models import OutboxEvent, Relay
from tests.contrib.outbox.events import publish_all, told
from tests.contrib.outbox.rows import buffers_of, waiting
from tests.support import checks


def test_the_relay_publishes_once_and_ends(outbox):
    publish_all("a")
    assert told("idempotency_outbox", "relay", "--once") == "default: 1 published"
    assert not Relay.objects.exists()


def test_the_relay_needs_somewhere_to_publish_to(outbox):
    outbox(PUBLISHERS={})
    with pytest.raises(CommandError, match="has no PUBLISHERS"):
        told("idempotency_outbox", "relay", "--once")
    outbox()
    with pytest.raises(CommandError, match="PUBLISHERS has no 'defualt': did you mean 'default'"):
        told("idempotency_outbox", "relay", "--once", "--publisher", "defualt")


LOCAL = "django_idempotency.contrib.outbox.publishers.local.LocalPublisher"


@pytest.mark.parametrize(
    ("options", "id", "sentence"),
    [
        ({"BATCH": 0}, "E001", 'IDEMPOTENCY["OUTBOX"]["BATCH"] is 0; it must be a number from 1 to 100000.'),
        ({"POLL": "1d"}, "E001", """IDEMPOTENCY["OUTBOX"]["POLL"] is '1d'; it must be a number of seconds"""),
        ({"ROUTES": {"a.*": "defualt"}}, "E001", "OUTBOX: ROUTES sends 'a.*' to 'defualt', which is not in PUBLISHERS"),
        ({"PUBLISHERS": {}}, "W002", "OUTBOX has no publisher called 'default'"),
    ],
)
def test_a_wrong_option_is_called_as_in_the_settings(outbox, options, id, sentence):
    assert checks.found(label=checks.OUTBOX) == []
    outbox(**options)
    (message,) = checks.found(label=checks.OUTBOX)
    assert message.id == f"django_idempotency_outbox.{id}"
    assert message.msg.startswith(sentence)


@pytest.mark.parametrize(
    ("backend", "options", "sentence"),
    [
        ("nowhere.Publisher", {}, "can't be created: No module named 'nowhere'"),
        ("datetime.datetime", {"year": 1}, "datetime.datetime is not a Publisher"),
        (LOCAL, {"function": print}, "unexpected keyword argument 'function'. Its options: handler."),
        (LOCAL, {"handler": "nowhere.at.all"}, "can't be created: No module named 'nowhere'"),
    ],
)
def test_e001_says_why_a_publisher_can_not_be_created(outbox, backend, options, sentence):
    outbox(PUBLISHERS={"default": {"BACKEND": backend, "OPTIONS": options}})
    (message,) = checks.found(label=checks.OUTBOX)
    assert message.id == "django_idempotency_outbox.E001"
    assert sentence in message.msg


def test_a_wrong_setting_outside_outbox_is_left_to_e001(settings):
    settings.IDEMPOTENCY = {"LEESE": 1}
    assert checks.found(label=checks.OUTBOX) == []


def test_the_status_says_why_events_fail(outbox, relay):
    publish_all("a")
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    one = relay()
    one.publisher.refuses = lambda event: "it says no"
    one.step()
    one.lanes.leave()
    assert told("idempotency_outbox", "status").endswith(
        "1 failing, 0 dead, 0 live relays. The first failing event: it says no"
    )
    assert json.loads(told("idempotency_outbox", "status", "--json"))["error"] == "it says no"


@pytest.mark.postgresql
def test_figures_cost_no_more_however_many_events_wait(outbox, monkeypatch):
    monkeypatch.setattr(maintenance, "MOST", 500)
    buffers = []
    for count in (1_000, 30_000):
        waiting(count, "1 hour")
        waiting(count, "0", attempts=0)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {OutboxEvent._meta.db_table}")
        buffers.append(buffers_of(maintenance.figures))
    assert buffers[1] < buffers[0] + 1_000
