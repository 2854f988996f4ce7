"""The game day evaluates the rules of the documentation, with only their times changed, and tells blocks truly."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from tests.gameday import ground, operations
from tests.gameday.callers import Answer, seen
from tests.gameday.rules import PACE, quicker
from tests.instrumentation.metered import MONITORING, alert_rules
from tests.instrumentation.test_alerts import promtool
from tests.support.servers import ROOT


def quicker_rules():
    return quicker((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]


def test_only_the_times_of_the_rules_are_others():
    for before, after in zip(alert_rules(), quicker_rules(), strict=True):
        times = r"\[\w+\]|offset \w+" + r"|> [\d.]+$" * ("_seconds" in before["expr"])
        assert re.sub(times, "", before["expr"]) == re.sub(times, "", after["expr"])
        assert ("for" in before) == ("for" in after)
        assert {**before, "expr": "", "for": ""} == {**after, "expr": "", "for": ""}


def test_the_times_are_divided_by_the_pace():
    stuck = next(rule for rule in quicker_rules() if rule["alert"] == "IdempotencyKeysStuck")
    assert stuck["for"] == f"{15 * 60_000 // PACE}ms"
    lag = next(rule for rule in quicker_rules() if rule["alert"] == "IdempotencyCleanupLagging")
    assert lag["expr"].endswith(f"> {3600 / PACE:g}")


@pytest.mark.promtool
def test_prometheus_takes_the_quicker_rules(tmp_path):
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(quicker((MONITORING / "alerts.yml").read_text())))
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


@pytest.mark.parametrize("settings", [ground.SETTINGS, operations.SETTINGS])
def test_the_service_takes_the_settings_of_the_game_day(settings):
    subprocess.run([sys.executable, "-m", "django", "check", "--settings", settings], cwd=ROOT, check=True)


def test_responses_under_way_before_an_operation_count():
    answers = [Answer(9.5, 10.5, "201"), Answer(10.6, 14.0, "503"), Answer(13.9, 14.5, "201")]
    saw = seen(answers, begun=10.0)
    assert saw.answers == {"201": 2, "503": 1}
    assert (saw.silence, saw.slowest) == (pytest.approx(3.5), pytest.approx(3.4))


def test_a_silence_is_counted_from_the_beginning_of_the_operation():
    assert seen([Answer(9.9, 16.0, "201")], begun=10.0).silence == pytest.approx(6.0)
