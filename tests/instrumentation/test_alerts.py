"""The alert rules and the Grafana dashboard: each alert fires when it should, and only
then.

``promtool`` evaluates the rules over series by minute. One process of it runs many
tests. The game day evaluates the same rules, with only their times changed.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from django_idempotency.instrumentation import metrics
from django_idempotency.values.outcomes import Rejection
from tests.gameday import ground
from tests.gameday.rules import quicker
from tests.instrumentation.metered import MONITORING, alert_rules, panel_expressions
from tests.support.servers import ROOT

GAUGES = [gauge for family in metrics.gauge_families for gauge in family.gauges]


def test_alerts_and_dashboard_use_metrics_that_there_are():
    known = {
        metrics.in_prometheus(metric)
        for metric in (*metrics.counters_of(None), *GAUGES)
    }
    known |= {
        f"{metrics.in_prometheus(metrics.RUN)}_{part}"
        for part in ("bucket", "sum", "count")
    }
    expressions = " ".join(
        [rule["expr"] for rule in alert_rules()] + panel_expressions()
    )
    assert set(re.findall(r"idempotency_\w+", expressions)) <= known


def promtool(*arguments):
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True
    )


def check(command, file, content):
    file.write_text(yaml.safe_dump(content))
    checked = promtool(command, "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
def test_prometheus_takes_every_expression_of_the_dashboard(tmp_path):
    rules = [
        {
            "record": f"panel:{number}",
            "expr": expression.replace("$__rate_interval", "5m"),
        }
        for number, expression in enumerate(panel_expressions())
    ]
    assert len(rules) > 8
    check(
        "check",
        tmp_path / "panels.yml",
        {"groups": [{"name": "panels", "rules": rules}]},
    )


FIGURE = '{database="a"}'
LABELLED = '{entry_point="mixin",view="shop.views.Pay"}'
UP, PARTITIONS_UP, OUTBOX_UP, STEPS_UP, OPERATIONS_UP = ALL_UP = [
    f'idempotency_table_up{{database="a",figures="{name}"}}'
    for name in ("records", "partitions", "outbox", "steps", "operations")
]
CLAIMED = "idempotency_key_claimed_total" + LABELLED
REPLAYED = "idempotency_response_replayed_total" + LABELLED
FAILED = "idempotency_store_failed_total" + LABELLED
TAKEN_OVER = "idempotency_key_taken_over_total" + LABELLED
UNPROTECTED = (
    'idempotency_request_unprotected_total{entry_point="middleware",'
    'view="shop.views.Pay",reason="no_scope"}'
)
STALE = "idempotency_stale_write_rejected_total" + LABELLED


def rejected(reason):
    labels = f'entry_point="mixin",view="shop.views.Pay",reason="{reason}"'
    return f"idempotency_request_rejected_total{{{labels}}}"


def held(reason):
    return f'idempotency_steps_on_hold{{database="a",step="fax",reason="{reason}"}}'


UNFINISHED = 'idempotency_steps_unfinished_age_seconds{database="a",step="fax"}'


def pending(percentile):
    return f'idempotency_pending_age_seconds{{database="a",percentile="{percentile}"}}'


# What makes each alert fire: series, by minute, for two hours.
FIRES = {
    "IdempotencyStoreFailing": {FAILED: "0+5x120"},
    "IdempotencyRequestsUnprotected": {UNPROTECTED: "0x60 1x60"},
    "IdempotencyManyReplays": {REPLAYED: "0+10x120", CLAIMED: "0+100x120"},
    "IdempotencyManyConflicts": {
        rejected("in_flight"): "0+20x120",
        CLAIMED: "0+100x120",
    },
    "IdempotencyKeysReused": {rejected("key_reused"): "0+5x120", CLAIMED: "0+100x120"},
    "IdempotencyWorkersCrashing": {TAKEN_OVER: "0+5x120", CLAIMED: "0+100x120"},
    "IdempotencyStaleWrites": {STALE: "0x60 1x60"},
    "IdempotencyKeysOnHold": {"idempotency_on_hold" + FIGURE: "3x120"},
    "IdempotencyKeysOnHoldTooLong": {
        "idempotency_on_hold_age_seconds" + FIGURE: "7200x120"
    },
    "IdempotencyKeysOnHoldRetried": {rejected("on_hold"): "0x60 1x60"},
    "IdempotencyWaitTimeouts": {rejected("wait_timeout"): "0+2x120"},
    "IdempotencyKeysNotAdmitted": {rejected("not_admitted"): "0+500x120"},
    "IdempotencyKeysStuck": {"idempotency_stuck" + FIGURE: "3x120"},
    "IdempotencyPendingTooLong": {pending(100): "900x120"},
    "IdempotencyCleanupLagging": {
        "idempotency_cleanup_lag_seconds" + FIGURE: "7200x120"
    },
    "IdempotencyPartitionsRunningOut": {
        "idempotency_partitions_ahead_seconds" + FIGURE: "40000x120"
    },
    "IdempotencyTableFiguresMissing": {
        UP: "0x120",
        OUTBOX_UP: "1x120",
    },
    "IdempotencyMetricsMissing": {UP: "1x50"},
    "IdempotencyStepsUnfinished": {UNFINISHED: "90000x120"},
    "IdempotencyStepsDrifted": {held("code_changed"): "1x120"},
    "IdempotencyStepOutcomeUnknown": {held("outcome_unknown"): "2x120"},
    "IdempotencyOutboxNoRelay": {
        'idempotency_outbox_relays{publisher="a"}': "0x120",
        'idempotency_outbox_pending{publisher="a"}': "5x120",
        'idempotency_outbox_relays{publisher="b"}': "1x120",
    },
    "IdempotencyOperationsWaiting": {
        'idempotency_operations_age_seconds{operation="o"}': "7200x120"
    },
    "IdempotencyOutboxDelayed": {
        'idempotency_outbox_age_seconds{publisher="a"}': "900x120"
    },
    "IdempotencyOutboxDeadLetters": {'idempotency_outbox_dead{publisher="a"}': "1x120"},
}
ON_FIGURES = {
    *("IdempotencyKeysOnHold", "IdempotencyKeysOnHoldTooLong", "IdempotencyKeysStuck"),
    *(
        "IdempotencyPendingTooLong",
        "IdempotencyCleanupLagging",
        "IdempotencyPartitionsRunningOut",
        "IdempotencyOperationsWaiting",
    ),
    *(name for name in FIRES if "Step" in name),
}
OUTBOX = {name for name in FIRES if "Outbox" in name}
WELL = {
    CLAIMED: "0+1000x120",
    REPLAYED: "0+2x120",
    **dict.fromkeys(ALL_UP, "1x120"),
    pending(100): "200x120",
    UNFINISHED: "4000x120",
    held("result_unreadable"): "1x120",
    "idempotency_partitions_ahead_seconds" + FIGURE: "600000x120",
    **dict.fromkeys(
        (
            f"idempotency_{name}{FIGURE}"
            for name in ("stuck", "on_hold", "on_hold_age_seconds")
        ),
        "0x120",
    ),
    **{
        f'idempotency_outbox_{name}{{publisher="a"}}': "0x120"
        for name in ("relays", "pending", "dead", "age_seconds")
    },
    **dict.fromkeys(
        (FAILED, STALE, TAKEN_OVER, UNPROTECTED, *map(rejected, Rejection)), "0x120"
    ),
}


def ending(series, minute):
    """The same series, without samples from ``minute`` on."""
    return {name: f"{values.split('x')[0]}x{minute}" for name, values in series.items()}


def healed(series):
    """The same figures, well since a few minutes."""
    well = 600_000 if "partitions" in "".join(series) else 0
    return {
        name: f"{values.split('x')[0]}x60 {well}x60" for name, values in series.items()
    }


SICK = dict.fromkeys(ALL_UP, "1x40 0x80")
# One busy view hides what happens in another.
BUSY = CLAIMED.replace("shop.views.Pay", "shop.views.Busy")
CALM = WELL | {CLAIMED: "0+2x120", REPLAYED: "0x120"}
# Callers met a store that was away; their retries are replays, conflicts and takeovers
# in the minute after it.
AFTER_AN_OUTAGE = (
    FAILED,
    TAKEN_OVER,
    REPLAYED,
    rejected("in_flight"),
    rejected("wait_timeout"),
)
CASES = {
    "each fires": {alert: (series, [alert]) for alert, series in FIRES.items()},
    "all is well": {"all": (WELL, [])},
    # Of 300 keys one hangs; a transaction holds the lock of a key; each in a calm shop.
    "what is rare": {
        "one of 300 keys": (
            WELL | {pending(99): "2x120", pending(100): "900x120"},
            ["IdempotencyPendingTooLong"],
        ),
        "a claim by lock": (
            WELL | {"idempotency_pending_by_lock_age_seconds" + FIGURE: "7200x120"},
            ["IdempotencyPendingTooLong"],
        ),
    },
    "the first event of a process": {
        alert: (dict.fromkeys(FIRES[alert], "_x60 1x60"), [alert])
        for alert in (
            "IdempotencyRequestsUnprotected",
            "IdempotencyStaleWrites",
            "IdempotencyKeysOnHoldRetried",
        )
    },
    "what happened once": {
        "one 422 among 40": (CALM | {rejected("key_reused"): "0x40 1x80"}, []),
        "one takeover among 40": (CALM | {TAKEN_OVER: "0x50 1x70"}, []),
        "one replay among 40": (CALM | {REPLAYED: "0x40 1x80"}, []),
    },
    "a minute's outage that is over": {
        f"{minutes} minutes ago": (
            WELL
            | {CLAIMED: "0+100x120", UP: f"1x{65 - minutes} 0 1x60"}
            | dict.fromkeys(AFTER_AN_OUTAGE, f"0x{65 - minutes} 80x120"),
            [],
        )
        for minutes in range(1, 35)
    },
    "failed scrapes": {
        alert: (ending(FIRES[alert], 57), [alert]) for alert in ON_FIGURES | OUTBOX
    },
    "a sick database": {
        alert: (
            ending(FIRES[alert], 40) | SICK,
            [alert, "IdempotencyTableFiguresMissing"],
        )
        for alert in ON_FIGURES | OUTBOX
    },
    "only the figures of the outbox fail": {
        "outbox": (
            WELL | {OUTBOX_UP: "1x40 0x80"},
            ["IdempotencyTableFiguresMissing"],
        )
    },
    "a view with more conflicts than claims": {
        "beside a busy one": (
            WELL
            | {
                BUSY: "0+5000x120",
                CLAIMED: "0+2x120",
                rejected("in_flight"): "0+60x120",
            }
            | {REPLAYED: "0x120"},
            ["IdempotencyManyConflicts"],
        )
    },
    "figures that are well again": {
        alert: (healed(FIRES[alert]) | {UP: "1x120"}, []) for alert in ON_FIGURES
    },
}
TARGET = {"job": "shop", "instance": "web-1:8000", "environment": "production"}


def of_target(series):
    """The series with the labels that Prometheus adds to what it scrapes."""
    return (
        series[:-1]
        + "".join(f',{name}="{value}"' for name, value in TARGET.items())
        + "}"
    )


def firing(name, series, expected):
    """A test: exactly ``expected`` alerts fire after an hour and five minutes, with the
    labels of their target.
    """
    labels = [
        {"alertname": alert, **TARGET}
        | ({"instance": ""} if alert == "IdempotencyMetricsMissing" else {})
        for alert in expected
    ]
    written = [
        ",".join(f'{name}="{value}"' for name, value in each.items() if value)
        for each in labels
    ]
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": of_target(name), "values": values}
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": (
                    "count by (alertname, job, instance, environment)"
                    ' (ALERTS{alertstate="firing"})'
                ),
                "eval_time": "65m",
                "exp_samples": [
                    {"labels": f"{{{each}}}", "value": 1} for each in written
                ],
            }
        ],
    }


@pytest.mark.promtool
@pytest.mark.parametrize("what", CASES)
def test_exactly_the_right_alerts_fire(what, tmp_path):
    tests = [
        firing(name, series, expected)
        for name, (series, expected) in CASES[what].items()
    ]
    check(
        "test",
        tmp_path / "tests.yml",
        {"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests},
    )


def test_every_alert_is_seen_to_fire():
    assert [rule["alert"] for rule in alert_rules()] == list(FIRES)


def test_a_database_that_is_away_is_critical():
    """Where authentication fails first, no request counts as one whose store failed."""
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in alert_rules()}
    assert (
        severities["IdempotencyStoreFailing"]
        == severities["IdempotencyTableFiguresMissing"]
        == "critical"
    )


def test_every_alert_says_what_it_means_and_where_to_look():
    for rule in alert_rules():
        said = rule["annotations"]
        assert said.keys() == {"summary", "description", "runbook_url", "dashboard"}
        assert said["runbook_url"].endswith(f"/runbooks/#{rule['alert'].lower()}")


def test_the_dashboard_shows_every_figure_that_an_alert_is_on():
    alerted = set(
        re.findall(r"idempotency_\w+", " ".join(rule["expr"] for rule in alert_rules()))
    )
    outbox = {name for name in alerted if "outbox" in name}
    figures = {metrics.in_prometheus(gauge) for gauge in GAUGES} - outbox
    assert alerted & figures <= set(
        re.findall(r"idempotency_\w+", " ".join(panel_expressions()))
    )


def quicker_rules():
    return quicker((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]


def test_only_the_times_of_the_rules_are_others():
    for before, after in zip(alert_rules(), quicker_rules(), strict=True):
        times = r"\[\w+\]|offset \w+" + r"|> [\d.]+$" * ("_seconds" in before["expr"])
        assert re.sub(times, "", before["expr"]) == re.sub(times, "", after["expr"])
        assert ("for" in before) == ("for" in after)
        assert {**before, "expr": "", "for": ""} == {**after, "expr": "", "for": ""}


@pytest.mark.promtool
def test_prometheus_takes_the_quicker_rules(tmp_path):
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump(quicker((MONITORING / "alerts.yml").read_text()))
    )
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


def test_the_service_takes_the_settings_of_the_game_day():
    subprocess.run(
        [sys.executable, "-m", "django", "check", "--settings", ground.SETTINGS],
        cwd=ROOT,
        check=True,
    )
