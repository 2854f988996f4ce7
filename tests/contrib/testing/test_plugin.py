"""The plugin for pytest, in suites of their own: what ``--idempotency-twice`` finds,
and that it does no harm.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# In a clone whose entry points are installed, and in one where they are not, it is
# loaded once.
PLUGIN = [
    "-p",
    "no:django_idempotency",
    "-p",
    "django_idempotency.contrib.testing.plugin",
]
SUITE = """
import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from testproject.models import LedgerEntry

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def customer(db):
    get_user_model().objects.create_user("payer")


def test_protected(customer, client):
    assert client.post("/orders/", headers=KEY).status_code == 201
    assert LedgerEntry.objects.count() == 1


def test_two_effects(customer, client):
    client.post("/unprotected/", headers=KEY)
    assert LedgerEntry.objects.count() == 1, "what the second request did is undone"


def test_another_response(customer, client):
    client.post("/pointed/", headers=KEY)


def test_an_error_is_left_alone(customer, client):
    assert client.post("/refusals/", headers=KEY).status_code == 422


def test_without_a_key(customer, client):
    client.post("/unprotected/")


def test_a_safe_method(customer, client):
    client.get("/unprotected/", headers=KEY)


def test_an_anonymous_caller(customer, client):
    assert client.post("/nobody/").status_code == 201


def test_streams(customer, client):
    assert client.post("/streams/", headers=KEY).getvalue()


def test_a_body_is_sent_twice(customer, client):
    assert client.post("/orders/", {"item": "book"}, headers=KEY).status_code == 201


def test_queries_of_the_second_are_not_counted(customer, client):
    with CaptureQueriesContext(connection) as queries:
        client.post("/orders/", headers=KEY)
    assert sum("ledgerentry" in query["sql"] for query in queries) == 1


def test_a_failure_of_its_own(customer, client):
    client.post("/unprotected/", headers=KEY)
    raise ValueError("own")


@pytest.fixture
def ordered(customer, client):
    client.post("/unprotected/mails/", headers=KEY)


def test_a_fixture(ordered):
    pass


class TestOfDjango(TestCase):
    def test_unittest(self):
        get_user_model().objects.create_user("payer")
        self.client.post("/unprotected/", headers=KEY)


def test_a_request_without_a_database(client):
    client.post("/nothing/", headers=KEY)
"""


def run(directory, suite, *options, ini="", **environment):
    """The lines that a run of ``suite`` prints."""
    (directory / "test_suite.py").write_text(suite)
    (directory / "pytest.ini").write_text(f"[pytest]\n{ini}")
    inherited = {
        name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *PLUGIN,
            *options,
        ],
        cwd=directory,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    return f"{done.stdout}{done.stderr}exit status {done.returncode}"


def twice(directory, suite, *options, **more):
    return run(
        directory,
        suite,
        "--ds=tests.contrib.testing.suite_settings",
        "--no-migrations",
        "-rA",
        *options,
        **more,
    )


def ended(output, outcome):
    return set(re.findall(rf"^{outcome} test_suite.py::(?:\w+::)?(\w+)", output, re.M))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """By workers of pytest-xdist, if it is installed, which tell what they have
    sent.
    """
    workers = ("-n", "2") if find_spec("xdist") else ()
    return twice(
        tmp_path_factory.mktemp("keyed"), SUITE, "--idempotency-twice", *workers
    )


def test_only_tests_with_a_fault_fail(keyed):
    assert ended(keyed, "FAILED") == {
        *(
            "test_two_effects",
            "test_another_response",
            "test_a_failure_of_its_own",
            "test_a_fixture",
        ),
        "test_unittest",
    }, keyed
    assert not ended(keyed, "ERROR")


def test_the_report_of_a_failed_test_names_each_difference(keyed):
    assert "POST /unprotected/ was sent twice:" in keyed
    assert "testproject.LedgerEntry: 1 more row" in keyed
    assert "status 201, then 200" in keyed
    assert "mail.outbox: 1, then 2" in keyed


def test_a_test_that_fails_by_itself_says_so_first(keyed):
    (failure,) = re.findall(
        r"^_+ test_a_failure_of_its_own _+$.*?^(?:_+ |=+ )", keyed, re.M | re.S
    )
    assert failure.index("ValueError: own") < failure.index("requests sent twice")


def test_the_end_of_the_run_lists_what_differed(keyed):
    _before, _title, summary = keyed.partition(" requests sent twice ===")
    assert "POST /unprotected/: 3 of 3" in summary
    assert re.search(
        r"1?[0-9] requests were sent twice; 5 differed the second time", keyed
    )


NOTHING_TO_REPEAT = """
def test_a_safe_method(client):
    client.get("/nothing/", headers={"Idempotency-Key": "k"})
"""


@pytest.mark.parametrize(
    ("options", "status"),
    [(["--idempotency-twice"], 1), (["--idempotency-twice", "--co"], 0), ([], 0)],
)
def test_a_run_that_sends_nothing_twice_fails(options, status, tmp_path):
    output = twice(tmp_path, NOTHING_TO_REPEAT, *options)
    assert output.endswith(f"exit status {status}"), output
    assert ("0 requests were sent twice" in output) == (
        "--idempotency-twice" in options
    )


def test_the_option_all_sends_a_key_with_each_unsafe_request(tmp_path):
    chosen = "without_a_key or anonymous or safe_method or test_unittest"
    ini = "idempotency_twice_ignore = testproject.LedgerEntry"
    output = twice(tmp_path, SUITE, "--idempotency-twice=all", "-k", chosen, ini=ini)
    assert ended(output, "FAILED") == {"test_without_a_key", "test_unittest"}, output
    assert ended(output, "PASSED") == {"test_a_safe_method", "test_an_anonymous_caller"}
    assert "body b" in output
    assert "2 requests were sent twice; 2 differed" in output
    assert "more row" not in output, "the model is left out"


def test_without_the_option_not_even_django_is_imported(tmp_path):
    suite = "import sys\n\ndef test_it():\n    assert 'django' not in sys.modules\n"
    output = run(tmp_path, suite, "-p", "no:django", DJANGO_SETTINGS_MODULE="")
    assert "1 passed" in output, output


def test_the_test_kit_imports_without_settings():
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "DJANGO_SETTINGS_MODULE"
    }
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "import django_idempotency.contrib.testing",
    ]
    subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, check=True)
