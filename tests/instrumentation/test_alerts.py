"""The alert rules and the Grafana dashboard name metrics that there are."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from django_idempotency.instrumentation import metrics
from django_idempotency.outcomes import Rejection
from tests.instrumentation.metered import MONITORING, alert_rules, panel_expressions

GAUGES = (*metrics.GAUGES, *metrics.OUTBOX_GAUGES)
pytestmark = pytest.mark.usefixtures("payer")


def test_alerts_and_dashboard_use_metrics_that_there_are():
    known = {metrics.in_prometheus(metric) for metric in (*metrics.COUNTERS, *GAUGES, metrics.TABLE_UP)}
    known |= {f"{metrics.in_prometheus(metrics.RUN)}_{part}" for part in ("bucket", "sum", "count")}
    expressions = " ".join([rule["expr"] for rule in alert_rules()] + panel_expressions())
    assert set(re.findall(r"idempotency_\w+", expressions)) <= known


def promtool(*arguments):
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.promtool
def test_prometheus_takes_the_alert_rules():
    checked = promtool("check", "rules", MONITORING / "alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
def test_prometheus_takes_every_expression_of_the_dashboard(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(panel_expressions())
    ]
    assert len(rules) > 8
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


FIGURE = '{database="a"}'
LABELLED = '{entry_point="mixin",view="shop.views.Pay"}'


def rejected(reason):
    return f'idempotency_request_rejected_total{{entry_point="mixin",view="shop.views.Pay",reason="{reason}"}}'


# What makes each alert fire: series, by minute, for two hours.
FIRES = {
    "IdempotencyStoreFails": {"idempotency_store_failed_total" + LABELLED: "0+5x120"},
    "IdempotencyRetriesAreMany": {
        "idempotency_response_replayed_total" + LABELLED: "0+10x120",
        "idempotency_key_claimed_total" + LABELLED: "0+100x120",
    },
    "IdempotencyConflictsAreMany": {
        rejected("in_flight"): "0+20x120",
        "idempotency_key_claimed_total" + LABELLED: "0+100x120",
    },
    "IdempotencyKeysAreMisused": {
        rejected("key_reused"): "0+5x120",
        "idempotency_key_claimed_total" + LABELLED: "0+100x120",
    },
    "IdempotencyOwnersDie": {
        "idempotency_key_taken_over_total" + LABELLED: "0+5x120",
        "idempotency_key_claimed_total" + LABELLED: "0+100x120",
    },
    "IdempotencyStaleWrites": {"idempotency_stale_write_rejected_total" + LABELLED: "0x60 1x60"},
    "IdempotencyKeysOnHold": {"idempotency_on_hold" + FIGURE: "3x120"},
    "IdempotencyKeysOnHoldTooLong": {"idempotency_on_hold_age_seconds" + FIGURE: "7200x120"},
    "IdempotencyCallersMeetKeysOnHold": {rejected("on_hold"): "0x60 1x60"},
    "IdempotencyWaitsInVain": {rejected("wait_timeout"): "0+2x120"},
    "IdempotencyKeysAreStuck": {"idempotency_stuck" + FIGURE: "3x120"},
    "IdempotencyPendingTooLong": {'idempotency_pending_age_seconds{database="a",percentile="99"}': "900x120"},
    "IdempotencyCleanupLags": {"idempotency_cleanup_lag_seconds" + FIGURE: "7200x120"},
    "IdempotencyFiguresMissing": {
        'idempotency_table_up{database="a"}': "0x120",
        'idempotency_table_up{database="b"}': "1x120",
    },
    "IdempotencyCollectorDown": {"idempotency_table_up" + FIGURE: "1x50"},
    "IdempotencyOutboxHasNoRelay": {
        'idempotency_outbox_relays{publisher="a"}': "0x120",
        'idempotency_outbox_pending{publisher="a"}': "5x120",
        'idempotency_outbox_relays{publisher="b"}': "1x120",
    },
    "IdempotencyOutboxIsLate": {'idempotency_outbox_age_seconds{publisher="a"}': "900x120"},
    "IdempotencyOutboxHasDeadLetters": {'idempotency_outbox_dead{publisher="a"}': "1x120"},
}
ON_FIGURES = {
    *("IdempotencyKeysOnHold", "IdempotencyKeysOnHoldTooLong", "IdempotencyKeysAreStuck"),
    *("IdempotencyPendingTooLong", "IdempotencyCleanupLags"),
}
OUTBOX = {name for name in FIRES if "Outbox" in name}
WELL = {
    "idempotency_key_claimed_total" + LABELLED: "0+1000x120",
    "idempotency_response_replayed_total" + LABELLED: "0+2x120",
    "idempotency_table_up" + FIGURE: "1x120",
    **dict.fromkeys((f"idempotency_{name}{FIGURE}" for name in ("stuck", "on_hold", "on_hold_age_seconds")), "0x120"),
    **{f'idempotency_outbox_{name}{{publisher="a"}}': "0x120" for name in ("relays", "pending", "dead", "age_seconds")},
    **{
        f"idempotency_{name}_total{LABELLED}": "0x120"
        for name in ("store_failed", "stale_write_rejected", "key_taken_over")
    },
    **{rejected(reason): "0x120" for reason in Rejection},
}


TARGET = {"job": "shop", "instance": "web-1:8000", "environment": "production"}


def of_target(series):
    """The series with the labels that Prometheus adds to what it scrapes."""
    return series[:-1] + "".join(f',{name}="{value}"' for name, value in TARGET.items()) + "}"


def firing(tmp_path, series, expected):
    """Whether exactly ``expected`` alerts fire after an hour and five minutes, with the labels of their target."""
    labels = [
        {"alertname": name, **TARGET} | ({"instance": ""} if name == "IdempotencyCollectorDown" else {})
        for name in expected
    ]
    written = [",".join(f'{name}="{value}"' for name, value in each.items() if value) for each in labels]
    test = {
        "interval": "1m",
        "input_series": [{"series": of_target(name), "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, job, instance, environment) (ALERTS{alertstate="firing"})',
                "eval_time": "65m",
                "exp_samples": [{"labels": f"{{{each}}}", "value": 1} for each in written],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "tests": [test]}))
    checked = promtool("test", "rules", file)
    return checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_should(alert, tmp_path):
    fires, why = firing(tmp_path, FIRES[alert], [alert])
    assert fires, why


@pytest.mark.promtool
def test_no_alert_fires_when_all_is_well(tmp_path):
    fires, why = firing(tmp_path, WELL, [])
    assert fires, why


def ending(series, minute):
    """The same series, without samples from ``minute`` on."""
    return {name: f"{values.split('x')[0]}x{minute}" for name, values in series.items()}


@pytest.mark.promtool
@pytest.mark.parametrize("alert", sorted(ON_FIGURES | OUTBOX))
def test_an_alert_on_figures_outlives_failed_scrapes(alert, tmp_path):
    fires, why = firing(tmp_path, ending(FIRES[alert], 57), [alert])
    assert fires, why


@pytest.mark.promtool
@pytest.mark.parametrize("alert", sorted(ON_FIGURES))
def test_an_alert_on_figures_outlives_a_sick_database(alert, tmp_path):
    sick = {"idempotency_table_up" + FIGURE: "1x40 0x80"}
    fires, why = firing(tmp_path, ending(FIRES[alert], 40) | sick, [alert, "IdempotencyFiguresMissing"])
    assert fires, why


@pytest.mark.promtool
@pytest.mark.parametrize("alert", sorted(ON_FIGURES))
def test_an_alert_on_figures_resolves_when_they_do(alert, tmp_path):
    ((name, values),) = FIRES[alert].items()
    well = {name: f"{values.split('x')[0]}x60 0x60", "idempotency_table_up" + FIGURE: "1x120"}
    fires, why = firing(tmp_path, well, [])
    assert fires, why


def test_every_alert_says_what_it_means_and_where_to_look():
    for rule in alert_rules():
        said = rule["annotations"]
        assert said.keys() == {"summary", "description", "runbook_url", "dashboard"}
        assert said["runbook_url"].endswith(f"/runbooks/#{rule['alert'].lower()}")


def test_the_dashboard_shows_every_figure_that_an_alert_is_on():
    figures = r"idempotency_(?:on_hold|on_hold_age_seconds|stuck|pending_age_seconds|cleanup_lag_seconds|table_up)\b"
    alerted = set(re.findall(figures, " ".join(rule["expr"] for rule in alert_rules())))
    assert len(alerted) == 6
    assert alerted <= set(re.findall(r"idempotency_\w+", " ".join(panel_expressions())))


def test_every_alert_is_seen_to_fire():
    assert [rule["alert"] for rule in alert_rules()] == list(FIRES)
