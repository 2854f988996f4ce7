"""docs/migrating.md says what the other packages do, what this one does, and what
happens while both are there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.db import connection
from django.test import override_settings

import django_idempotency
from django_idempotency import conf, middleware
from django_idempotency.contrib import testing
from django_idempotency.values.policy import Policy
from django_idempotency.values.rules import rules
from tests.support.databases import create_database, drop_database
from tests.support.pages import code, rows, section, text
from tests.support.requirements import PEERS, ROOT
from tests.unit.test_docs import GROUPS, defaults

pytestmark = [pytest.mark.peers, pytest.mark.postgresql, pytest.mark.slow]

PAGE = "migrating.md"
# What the page names of this package, besides settings, options and commands.
NAMES = {
    *(f"{group.__name__}.{name}" for group in GROUPS for name in defaults(group)),
    "Fingerprint(…)",
    *{*django_idempotency.__all__, *vars(middleware), *testing.__all__},
    *(
        "IdempotentMixin",
        "child_key",
        "--idempotency-twice",
        "Idempotent-Replayed",
        "Idempotency-Key",
        "Retry-After",
    ),
    "django_idempotency.middleware",
}
FIRST, AGAIN = (201, True, 1), (201, False, 2)


@pytest.fixture(scope="module")
def observed(django_db_setup, django_db_blocker, tmp_path_factory):
    """What ``python -m tests.migrating`` has seen, by package."""
    name = f"{connection.settings_dict['NAME']}_migrating"
    with django_db_blocker.unblock():
        url = create_database(name, tmp_path_factory.mktemp("database"))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.migrating"],
                **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 800},
                env=os.environ | {"DATABASE_URL": url},
            )
        finally:
            drop_database(name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names_of(package):
    """The names of the package, and what has their place here."""
    return rows(section(PAGE, f"From {package}"))


def test_the_comparison_has_all_that_was_sent(observed):
    table = rows(section("comparison.md", "The same requests, by package"))
    assert table == [
        [name, seen[1], *(found["situations"][name][0] for found in observed.values())]
        for name, seen in next(iter(observed.values()))["situations"].items()
    ]
    assert (
        len(
            {
                json.dumps([ours for _theirs, ours in found["situations"].values()])
                for found in observed.values()
            }
        )
        == 1
    )


@pytest.mark.parametrize("package", PEERS)
def test_during_the_switch_only_the_retry_that_waits_runs_again(observed, package):
    switch = {name: tuple(found) for name, found in observed[package]["switch"].items()}
    there = 409 if package == "django-idempotency-key" else 201  # what it replays with
    assert switch["old, then both"] == switch["both, then old"] == (there, True, 1)
    assert switch["both, then ours"] == FIRST
    assert switch["ours, then both"] == FIRST
    assert switch["old, then ours"] == AGAIN
    in_flight = 423 if package == "idemkit" else 409
    assert switch["both at once"] == (in_flight, there, 1)
    assert switch["both, and ours meanwhile"] == (409, 201, 1)
    assert switch["ours, and both meanwhile"] == (409, 201, 1)


def test_drf_idempotency_stores_a_409_by_default(observed):
    unprepared = {
        package: found["unprepared"][1] for package, found in observed.items()
    }
    assert unprepared.pop("drf-idempotency") == 409
    assert set(unprepared.values()) == {201}


def test_the_page_says_what_the_others_keep_of_a_request(observed):
    stated = {
        package: kept
        for package, *kept in rows(section(PAGE, "Why there is no import"))
    }
    words = {True: "yes", False: "no"}
    assert stated == {
        package: [
            words[found["kept"][part]] for part in ("key", "caller", "body", "response")
        ]
        for package, found in observed.items()
    }


def test_the_versions_are_those_that_run_here():
    stated = {
        re.match(r"\[(.+?)\]", name)[1]: number
        for name, number, _who in rows(text(PAGE).partition("\n## ")[0])
    }
    assert stated == {package: version(package) for package in PEERS}
    pinned = re.search(
        r"^peers = \[(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )[1]
    assert dict(re.findall(r'"([\w-]+)==([\d.]+)"', pinned)) == stated


def test_the_two_packages_share_a_setting_and_refuse_each_others_names():
    from drf_idempotency.settings import get_setting

    with (
        override_settings(IDEMPOTENCY={"REQUIRE_KEY": True}),
        pytest.raises(ImproperlyConfigured, match="REQUIRE_KEY"),
    ):
        _ = conf.conf().required
    with (
        override_settings(IDEMPOTENCY={"RETENTION": 60}),
        pytest.raises(ImproperlyConfigured, match="RETENTION"),
    ):
        get_setting("REQUIRE_KEY")


@cache
def source(package):
    (directory,) = find_spec(PEERS[package]).submodule_search_locations
    return "".join(path.read_text() for path in sorted(Path(directory).rglob("*.py")))


def bare(name):
    return name.removeprefix("@").partition("=")[0]


@pytest.mark.parametrize("package", PEERS)
def test_every_name_of_the_other_package_is_one_of_its_own(package):
    named = {bare(name) for there, _here in names_of(package) for name in code(there)}
    assert {name for name in named if name not in source(package)} == set()


@pytest.mark.parametrize("package", PEERS)
def test_every_name_of_this_package_is_one_of_its_own(package):
    named = {bare(name) for _there, here in names_of(package) for name in code(here)}
    ours = {name for name, app in get_commands().items() if app == "django_idempotency"}
    assert (
        named - conf.NAMES - rules(Policy).keys() - ours - NAMES
        == {"MIDDLEWARE"} & named
    )
