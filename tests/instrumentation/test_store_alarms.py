"""What waits for an operator in a store outside the database is told by the metrics,
the command and the admin.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from django.core.management import call_command
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from django_idempotency.admin import alarms as strip
from django_idempotency.contrib.testing.stores import RESPONSE
from django_idempotency.instrumentation import metrics
from django_idempotency.instrumentation.prometheus import TableCollector
from django_idempotency.maintenance.stats import alarms_of_store
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Lease, Policy
from tests.instrumentation.metered import samples
from tests.stores.memory import MemoryStore
from tests.support.commands import told

pytestmark = pytest.mark.django_db
HOLD = Policy(mode=Lease(on_crash="hold"), store="default")
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def in_memory(settings):
    """The store has the alias that the database has, too."""
    settings.IDEMPOTENCY = {
        "STORES": {"default": {"BACKEND": f"{MemoryStore.__module__}.MemoryStore"}}
    }
    MemoryStore.rows.clear()
    yield
    MemoryStore.rows.clear()


@pytest.fixture
def waiting():
    """One key on hold for an hour, one whose lease ran out two hours ago, and two that
    need nobody.
    """
    store = store_for(HOLD)
    held, lapsed, _running, completed = claims = [
        store.claim(Operation("test", str(uuid4()), b"1" * 32, "POST", "/"), uuid4())
        for _ in range(4)
    ]
    store.fail(held, "nobody knows", on_hold=True)
    store.complete(completed, RESPONSE)
    shift(held.id, "created_at", HOUR)
    shift(lapsed.id, "locked_until", 2 * HOUR + timedelta(seconds=HOLD.mode.seconds))
    return claims


@pytest.fixture
def away(monkeypatch):
    def unfinished(_store):
        raise StoreUnavailable("connection refused")

    monkeypatch.setattr(MemoryStore, "unfinished", unfinished)


def shift(id, field, back):
    record = MemoryStore.rows[id]
    MemoryStore.rows[id] = replace(record, **{field: getattr(record, field) - back})


def scraped() -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(TableCollector())
    found = samples(generate_latest(registry).decode())
    mine = ("database", "store:default")
    return {
        name: value
        for name, values in found.items()
        for labels, value in values.items()
        if mine in labels
    }


def checked(*, exits, **limits):
    """What a check says of the store."""
    (facts,) = (
        line
        for line in told("idempotency_stats", "--check", exits=exits, **limits)
        if "store" in line
    )
    return facts


def test_metrics_tell_what_waits_in_a_store(waiting):
    found = scraped()
    assert (
        found["idempotency_on_hold"],
        found["idempotency_stuck"],
        found["idempotency_table_up"],
    ) == (1, 1, 1)
    assert found["idempotency_on_hold_age_seconds"] == pytest.approx(3600, abs=30)
    assert found["idempotency_stuck_age_seconds"] == pytest.approx(7200, abs=30)


def test_metrics_show_that_a_store_is_unavailable(away):
    assert scraped() == {"idempotency_table_up": 0}
    assert metrics.figures()[metrics.UP]["default"]["records"]


def test_a_check_is_critical_for_what_waits_in_a_store(waiting):
    facts = checked(exits=2)
    assert (facts["stuck"], facts["on_hold"], facts["exceeded"]) == (
        1,
        1,
        ["stuck", "on_hold"],
    )
    assert checked(exits=2, stuck_for=3 * 3600, on_hold_for=1800)["exceeded"] == [
        "on_hold"
    ]


def test_a_check_is_unknown_while_a_store_is_unavailable(away):
    assert (
        checked(exits=3)["error"]
        == "The database or store failed, or can't be reached: connection refused"
    )


def test_a_check_of_one_database_leaves_stores_out(waiting, capsys):
    call_command("idempotency_stats", check=True, database="default")
    assert "stuck" not in capsys.readouterr().out.replace("stuck for 0 s", "")


def test_the_strip_shows_what_waits_in_a_store_without_a_link(waiting, admin_client):
    page = admin_client.get(
        "/admin/django_idempotency/idempotencyrecord/"
    ).content.decode()
    assert "store default: 1 stuck, oldest 2 h" in page
    assert "store default: 1 on hold, oldest 1 h" in page
    assert "h</a>" not in page


def test_the_strip_says_that_a_store_is_unavailable(away):
    assert [alarm.text for alarm in strip.alarms("default")] == [
        "store default: did not respond"
    ]


def test_a_store_that_is_slow_to_list_its_records_is_given_up(waiting, monkeypatch):
    real = MemoryStore.unfinished
    now = [0.0]

    def slow(store):
        for record in real(store):
            now[0] += 0.6
            yield record

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(MemoryStore, "unfinished", slow)
    with pytest.raises(StoreUnavailable, match="could not be read in 1 s"):
        alarms_of_store("default", seconds=1)
    assert now[0] == 1.2
    assert alarms_of_store("default", seconds=2)["on_hold"] == 1
