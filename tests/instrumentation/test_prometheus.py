"""Metrics for Prometheus: what is counted is what happened."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.db.models import Value

from django_idempotency.conf import conf
from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.instrumentation import metrics, prometheus
from django_idempotency.maintenance.stats import MEASURES, stats
from django_idempotency.models import DatabaseNow
from django_idempotency.values.policy import Policy
from tests.instrumentation.metered import (
    KEY,
    LEASE,
    alert_rules,
    counted,
    everything,
    panel_expressions,
    samples,
    scraped,
    total,
)
from tests.support.callers import claim, entry_point, paying, shift
from tests.support.pages import FENCE
from tests.support.pages import text as page
from tests.support.threads import in_threads, locked
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

DEFAULT = frozenset({("database", "default")})
FAMILIES = [each.name for each in metrics.gauge_families if each is not metrics.UP]


def up(down=()):
    """Which figures of the database could be read."""
    return {DEFAULT | {("figures", name)}: int(name not in down) for name in FAMILIES}


TOKEN = {"Authorization": "Bearer token-for-prometheus"}


def test_each_event_is_counted_once_by_entry_point_and_view(registry):
    everything()
    expected = {
        **{
            "key_claimed": 4,
            "key_taken_over": 1,
            "response_replayed": 1,
            "request_rejected": 2,
        },
        **{"key_completed": 2, "key_released": 1},
    }
    assert counted(registry) == expected
    (hit,) = [
        labels
        for labels, value in samples(scraped(registry))[
            "idempotency_response_replayed_total"
        ].items()
        if value
    ]
    assert dict(hit) == {
        "entry_point": "decorator",
        "view": "tests.support.callers.paying",
    }


def test_installing_twice_counts_once(registry):
    prometheus.install(registry)
    entry_point(paying)()
    assert counted(registry) == {"key_claimed": 1, "key_completed": 1}


def test_a_rare_event_is_there_at_nought_before_it_happens(registry):
    entry_point(paying)()
    assert samples(scraped(registry))["idempotency_stale_write_rejected_total"] == {
        frozenset(
            {("entry_point", "decorator"), ("view", "tests.support.callers.paying")}
        ): 0
    }


def test_the_figures_are_those_of_the_table(registry):
    claim(policy=Policy(**LEASE))
    shift(locked_at=-100, locked_until=-1)
    found = samples(scraped(registry))
    assert found["idempotency_pending"] == found["idempotency_stuck"] == {DEFAULT: 1}
    ages = {
        dict(labels)["percentile"]: value
        for labels, value in found["idempotency_pending_age_seconds"].items()
    }
    assert ages.keys() == {"50", "95", "99", "100"}
    assert all(100 <= age < 200 for age in ages.values())
    assert found["idempotency_table_up"] == up()


@pytest.mark.promtool
def test_prometheus_accepts_the_metrics(registry):
    everything()
    with transaction.atomic():
        publish("a", {})
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scraped(registry),
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    OutboxEvent.objects.all().delete()


def test_the_figures_of_the_outbox_are_labelled_by_publisher(registry):
    with transaction.atomic():
        for topic in ("a", "b", "c"):
            publish(topic, {})
    hour_ago = DatabaseNow() - Value(timedelta(hours=1))
    OutboxEvent.objects.filter(topic="a").update(created_at=hour_ago, attempts=2)
    OutboxEvent.objects.filter(topic="c").update(
        status="dead", attempts=2, given_up_at=DatabaseNow()
    )
    found = samples(scraped(registry))
    by_default = frozenset({("publisher", "default")})
    told = {
        name: found[f"idempotency_outbox_{name}"][by_default]
        for name in ("pending", "failing", "dead", "relays")
    }
    assert told == {"pending": 2, "failing": 1, "dead": 1, "relays": 0}
    assert 3600 <= found["idempotency_outbox_age_seconds"][by_default] < 3700
    OutboxEvent.objects.all().delete()


def test_every_figure_is_one_that_there_is():
    assert stats().keys() <= MEASURES.keys()
    # PostgreSQL's alone
    assert MEASURES.keys() - stats().keys() <= {
        *("pending_by_lock", "pending_by_lock_oldest"),
        *("lock_waits", "lock_waits_oldest"),
    }


def test_many_scrapes_ask_the_database_once(registry, django_assert_num_queries):
    scraped(registry)
    with django_assert_num_queries(0):
        scraped(registry)


def test_a_failing_database_leaves_only_its_figures_out(
    registry, other_thread, monkeypatch, caplog
):
    entry_point(paying)()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        text = other_thread(scraped, registry)
    assert samples(text)["idempotency_table_up"] == up(down=FAMILIES)
    assert "idempotency_pending" not in samples(text)
    assert total(text, "key_claimed") == 1
    assert not [name for name in samples(text) if name.startswith("idempotency_outbox")]
    assert [record.event for record in caplog.records] == ["table_down"]


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("table", "lost", "kept"),
    [
        ("django_idempotency_record", "pending", "outbox_pending"),
        ("django_idempotency_outbox_event", "outbox_pending", "pending"),
    ],
)
def test_figures_that_take_too_long_leave_the_others_alone(
    registry, monkeypatch, caplog, table, lost, kept
):
    with transaction.atomic():
        publish("a", {})
    down = ["records", "steps"] if lost == "pending" else ["outbox"]
    with locked(table):
        for seconds in (0.1, 1, 10):  # a busy machine may need longer for the others
            metrics._tables.clear()
            caplog.clear()
            monkeypatch.setattr(metrics, "LONGEST", seconds)
            found = samples(scraped(registry))
            if found["idempotency_table_up"] == up(down=down):
                break
    assert f"idempotency_{kept}" in found
    assert f"idempotency_{lost}" not in found
    assert found["idempotency_table_up"] == up(down=down)
    assert "57014" in caplog.text
    assert [record.event for record in caplog.records] == ["table_down"] * len(down)
    OutboxEvent.objects.all().delete()


@pytest.mark.row_locks
def test_a_hanging_scrape_does_not_block_others(registry, monkeypatch):
    """It takes the connection and says nothing, so there is no statement yet that could
    have a limit.
    """
    monkeypatch.setattr(metrics, "LONGEST", 0.1)
    with (
        ThreadPoolExecutor(2) as pool,
        monkeypatch.context() as patch,
        ExitStack() as stack,
    ):
        silent = socket.create_server(("127.0.0.1", 0))
        silent.settimeout(60)
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", silent.getsockname()[1])
        first = pool.submit(_scraped_elsewhere, registry)
        stack.enter_context(silent.accept()[0])
        stack.enter_context(silent)  # closed first, so that nobody tries again
        text = pool.submit(_scraped_elsewhere, registry).result(60)
        assert not first.done()
        assert samples(text)["idempotency_table_up"] == up(down=FAMILIES)
        assert "idempotency_pending" not in samples(text)
    assert samples(first.result())["idempotency_table_up"] == up(down=FAMILIES)


def _scraped_elsewhere(registry):
    try:
        return scraped(registry)
    finally:
        connections.close_all()


def test_a_scrape_closes_its_connection(registry, other_thread):
    other_thread(scraped, registry)
    assert other_thread(lambda: connection.connection) is None


TOKENS = ["newest-of-two-tokens", "oldest-of-two-tokens"]


@pytest.mark.parametrize(
    ("tokens", "sent", "status"),
    [
        (TOKENS, {"Authorization": "Bearer newest-of-two-tokens"}, 200),
        (TOKENS, {"Authorization": "bearer oldest-of-two-tokens"}, 200),
        (TOKENS, {"Authorization": "Bearer newest-of-two-token"}, 401),
        (TOKENS, {"Authorization": "Basic newest-of-two-tokens"}, 401),
        (TOKENS, {"Authorization": "Bearer t\xf6ken-of-sixteen-characters"}, 401),
        (TOKENS, {}, 401),
        ([], {"Authorization": "Bearer "}, 401),
        ([], {}, 401),
    ],
)
def test_metrics_are_served_to_bearers_of_a_token(rf, settings, tokens, sent, status):
    settings.IDEMPOTENCY = {"METRICS_TOKENS": tokens}
    response = prometheus.scrape(rf.get("/metrics/", headers=sent))
    assert (response.status_code, b"python_info" in response.content) == (
        status,
        status == 200,
    )
    assert ("WWW-Authenticate" in response.headers) == (status == 401)


def test_metrics_may_be_served_to_everybody(rf):
    assert prometheus.unguarded_scrape(rf.get("/metrics/")).status_code == 200


@pytest.mark.parametrize(
    "tokens", [["short"], ["a token with spaces in it"], "token-for-prometheus", [7]]
)
def test_a_token_that_can_be_guessed_is_refused(settings, tokens):
    settings.IDEMPOTENCY = {"METRICS_TOKENS": tokens}
    with pytest.raises(ImproperlyConfigured, match="METRICS_TOKENS") as refused:
        conf()
    assert str(tokens) not in str(refused.value)


(RECIPE,) = [
    block
    for _language, block in FENCE.findall(page("monitoring.md"))
    if "def child_exit" in block
]
# and with time for a scrape on a busy machine
GAUGE = """
def post_worker_init(worker):
    from django_idempotency.instrumentation import metrics
    from prometheus_client import Gauge
    Gauge("shop_workers", "A project's own.", multiprocess_mode="livesum").set(1)
    metrics.LONGEST = 60
"""


@pytest.mark.server
def test_with_two_workers_a_scrape_of_either_tells_of_both_and_of_one_that_died(
    start_server, tmp_path
):
    (directory := tmp_path / "metrics").mkdir()
    (configuration := tmp_path / "gunicorn.conf.py").write_text(RECIPE + GAUGE)
    given = {
        "PROMETHEUS_MULTIPROC_DIR": str(directory),
        "GUNICORN_CMD_ARGS": f"--config {configuration} --timeout 120",
    }
    server, keys = start_server(INSTRUMENTATION="prometheus", **given), 0

    def pay(index):
        body = {"amount": 1, "currency": "EUR", "reference": f"scrape-{keys}-{index}"}
        for _time in range(2):
            assert (
                server.post(
                    "/api/charges/", body, key=f"{KEY}-{keys}-{index}"
                ).status_code
                == 201
            )

    def both_have_counted():
        nonlocal keys
        in_threads(8, pay)
        keys += 8
        return len(list(directory.glob("counter_*.db"))) == 2

    assert eventually(both_have_counted)
    for _time in range(8):
        text = server.http.get("/metrics/", headers=TOKEN).text
        assert (
            total(text, "key_claimed"),
            total(text, "response_replayed"),
            total(text, "key_completed"),
        ) == (
            keys,
            keys,
            keys,
        )
        assert samples(text)["idempotency_table_up"] == up()
    assert KEY not in text
    assert "scrape-" not in text
    assert set(re.findall(r'entry_point="(\w+)",view="([\w.]+)"', text)) == {
        ("mixin", "testproject.api.ChargeViewSet")
    }
    assert used_metrics() <= set(samples(text))

    def both_have_gauges():  # the client can't read a file that is still empty
        files = {directory / f"gauge_livesum_{pid}.db" for pid in server.workers()}
        return {*directory.glob("gauge_live*.db")} == files and all(
            file.stat().st_size for file in files
        )

    os.kill(died := server.workers()[0], signal.SIGKILL)
    eventually(lambda: len(server.workers()) == 2 and died not in server.workers())
    eventually(both_have_gauges)
    assert (
        total(server.http.get("/metrics/", headers=TOKEN).text, "key_claimed") == keys
    )


def used_metrics():
    expressions = [rule["expr"] for rule in alert_rules()] + panel_expressions()
    # Sizes are told by those databases alone that estimate them, partitions by a table
    # that has them, steps and operations where one waits.
    some = re.compile(r"idempotency_(table_(?!up)|partitions_|steps_|operations_)\w+")
    used = set(re.findall(r"idempotency_\w+", " ".join(expressions)))
    return {name for name in used if not some.match(name)}
