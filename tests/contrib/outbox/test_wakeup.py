"""Waiting for events: woken by a commit, by the clock where that can't be, and never by another publisher's events."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection, transaction

from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.outbox.relay import Wakeup
from tests.contrib.outbox.conftest import RECEIVER
from tests.contrib.outbox.events import publish_all
from tests.support.aliases import another_alias
from tests.support.private_servers import free_port
from tests.support.threads import in_threads

pytestmark = pytest.mark.postgresql

LONG = 30.0


@pytest.fixture
def wakeup(outbox):
    made = Wakeup("default", "default", listen=True)
    made.wait(0.01, threading.Event())
    yield made
    made.close()


def seconds_until(act, wakeup, most=LONG):
    """How long ``wakeup`` waits at most so long, while another thread does ``act``."""
    waited = []

    def wait():
        begun = time.monotonic()
        wakeup.wait(most, threading.Event())
        waited.append(time.monotonic() - begun)

    in_threads(2, lambda number: (wait, act)[number]())
    return waited[0]


def publish_one():
    publish_all("a")


def test_a_commit_wakes(wakeup):
    assert wakeup.connection
    assert seconds_until(publish_one, wakeup) < LONG / 2


def publish_and_roll_back():
    with transaction.atomic():
        publish("a", {})
        transaction.set_rollback(True)


@pytest.mark.parametrize(
    ("options", "act"),
    [
        ({}, publish_and_roll_back),
        ({"PUBLISHERS": {"other": {"BACKEND": RECEIVER}}, "ROUTES": {"a": "other"}}, publish_one),
        ({"NOTIFY": False}, publish_one),
    ],
    ids=["a rollback", "another publisher's event", "without NOTIFY"],
)
def test_nobody_is_woken_by(wakeup, outbox, options, act):
    outbox(**options)
    assert seconds_until(act, wakeup, most=0.5) >= 0.5


def test_a_listener_that_was_cut_off_listens_again(wakeup):
    def cut_off():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [wakeup.connection.info.backend_pid])

    assert seconds_until(cut_off, wakeup) < LONG / 2
    assert not wakeup.connection
    assert seconds_until(lambda: None, wakeup) < LONG / 2, "what was committed meanwhile has yet to be read"
    assert wakeup.connection
    assert seconds_until(publish_one, wakeup) < LONG / 2


def test_a_wakeup_without_a_spare_connection_polls(outbox):
    with another_alias("full", PORT=free_port()) as alias:
        wakeup = Wakeup("default", alias, listen=True)
        assert seconds_until(lambda: None, wakeup, most=0.2) >= 0.2
        assert not wakeup.connection


@pytest.mark.pgbouncer
def test_a_wakeup_behind_a_pooler_polls(outbox, pgbouncer, relay):
    from urllib.parse import urlsplit

    address = urlsplit(pgbouncer(connection.settings_dict["NAME"]))
    pooled = {"HOST": address.hostname, "PORT": address.port, "DISABLE_SERVER_SIDE_CURSORS": True}
    with another_alias("pooled", **pooled) as alias:
        wakeup = Wakeup("default", alias, listen=True)
        begun = time.monotonic()
        wakeup.wait(0.2, threading.Event())
        assert not wakeup.connection
        assert time.monotonic() - begun >= 0.2
        publish_one()
        one = relay()
        one.using = one.backlog.using = one.lanes.using = alias
        assert one.run_once() == 1
