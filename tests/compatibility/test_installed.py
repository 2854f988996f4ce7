"""The packages that the development environment has, by the scenario that the others go
through on demand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from django.db import connection

from tests.compatibility.__main__ import BEGIN, END
from tests.compatibility.scenario import STEPS
from tests.compatibility.setups import SETUPS
from tests.support.databases import database_url
from tests.support.requirements import ROOT

pytestmark = pytest.mark.slow

NAME = f"{connection.settings_dict['NAME']}_compatibility"
PAGE = ROOT / "docs/evidence/compatibility.md"


@pytest.mark.compatibility
@pytest.mark.postgresql
def test_other_packages_and_keys_work_together(db):
    done = subprocess.run(
        [sys.executable, "-m", "tests.compatibility.scenario", "installed.settings"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 800},
        env=os.environ | {"DATABASE_URL": database_url(connection.settings_dict, NAME)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {*SETUPS["installed"].requires}
    for package, steps in found.items():
        assert steps == dict.fromkeys(STEPS), package


def test_the_page_lists_each_project():
    page = PAGE.read_text()
    for setup in SETUPS.values():
        for package in setup.requires:
            assert f"| {package}" in page or f" {package} " in page
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert "**no**" not in table
    assert "not run" not in table


def test_the_page_names_tests_that_exist():
    deployments = (ROOT / "tests/deployment/test_deployments.py").read_text()
    section = (
        PAGE.read_text()
        .partition("## Servers and connections")[2]
        .partition("## psycopg2")[0]
    )
    named = {
        name
        for name in re.findall(r"(test_\w+|(?<=\[)\w+(?=-…))", section)
        if not name.startswith("test_dep")
    }
    assert len(named) > 10
    assert [name for name in named if name not in deployments] == []
