"""The game day evaluates the rules of the documentation, with only their times changed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from tests.gameday import ground
from tests.gameday.rules import quicker
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


@pytest.mark.promtool
def test_prometheus_takes_the_quicker_rules(tmp_path):
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(quicker((MONITORING / "alerts.yml").read_text())))
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


def test_the_service_takes_the_settings_of_the_game_day():
    subprocess.run([sys.executable, "-m", "django", "check", "--settings", ground.SETTINGS], cwd=ROOT, check=True)
