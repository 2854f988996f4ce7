"""When a client sends a request again: by what it got, and by what is left of its
attempts and of its time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.http.response import ResponseHeaders

from django_idempotency.contrib import client as module
from django_idempotency.contrib.client import Call, Retries, retry_after, should_retry
from django_idempotency.http.responses import problem_response
from django_idempotency.values.problems import problem
from tests.unit.test_docs import REFUSALS

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


def begun(method="POST", headers=(), **options):
    return Call(Retries(**options), method, ResponseHeaders(headers))


def key(method, headers=()):
    headers = ResponseHeaders(headers)
    Call(Retries(), method, headers)
    return headers.get("Idempotency-Key")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_call_gets_a_key_of_its_own(method):
    assert key(method) != key(method)
    assert key(method).startswith('"')
    assert len(key(method)) == 38


def test_a_key_of_the_callers_is_kept():
    assert key("POST", {"idempotency-key": '"mine"'}) == '"mine"'


@pytest.mark.parametrize(
    ("method", "headers", "repeated"),
    [("GET", {}, True), ("LOCK", {}, False), ("LOCK", {"Idempotency-Key": "k"}, True)],
)
def test_a_request_that_is_not_safe_is_repeated_only_with_a_key(
    method, headers, repeated
):
    for end in (
        lambda call: call.after_failure(),
        lambda call: call.after_response(503, ResponseHeaders({})),
    ):
        assert (end(begun(method, headers)) is not None) is repeated


@pytest.mark.parametrize(
    ("statuses", "said", "expected"),
    [
        ([408, 425, 429, 500, 502, 503, 504], None, True),
        ([200, 201, 302, 400, 401, 402, 404, 409, 410, 422], None, False),
        ([409, 503], "true", True),
        ([409, 503], "false", False),
        ([409], "maybe", False),
    ],
)
def test_x_should_retry_decides_or_else_the_status(statuses, said, expected):
    headers = {} if said is None else {"X-Should-Retry": said}
    assert {should_retry(status, headers) for status in statuses} == {expected}


@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__
)
def test_a_problem_has_x_should_retry_for_other_clients(refusal):
    ours = problem(refusal)
    expected = "true" if ours.retryable else "false"
    # the caller has to do something, or to send all of it
    if ours.retryable and ours.retry_after is None:
        expected = None
    assert problem_response(ours).headers.get("X-Should-Retry") == expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("0", 0),
        ("soon", 0),
        ("", 0),
        ("-1", 0),
        ("1.5", 0),
        ("\u0667", 0),
    ],
)
def test_retry_after_is_a_number_of_seconds(value, seconds):
    assert retry_after({"Retry-After": value}) == seconds


def test_waits_double_up_to_the_longest_however_many_attempts():
    call = begun(attempts=3000, total=1e9, first_wait=1, longest_wait=4)
    waits = [call.after_failure() for _ in range(2999)]
    assert all(
        most / 2 <= wait <= most
        for wait, most in zip(waits, (1, 2, *[4] * 2997), strict=True)
    )


def test_a_longer_retry_after_is_obeyed_and_a_shorter_one_waited_out():
    assert begun().after_response(503, ResponseHeaders({"retry-after": "50"})) == 50
    assert (
        begun(first_wait=8).after_response(503, ResponseHeaders({"retry-after": "1"}))
        >= 4
    )


def test_an_attempt_never_begins_after_the_total_time(clock):
    call = begun(total=10, first_wait=0)
    clock.now = 9.9
    assert call.after_failure() == 0
    assert call.after_response(503, ResponseHeaders({"Retry-After": "1"})) is None, (
        "it would begin at 10.9"
    )
    clock.now = 10.1
    assert call.after_failure() is None


@pytest.mark.http_clients
def test_the_client_imports_neither_django_nor_the_rest_of_the_package():
    program = """
import sys
sys.modules["django"] = sys.modules["http_sf"] = None
import django_idempotency.contrib.client.httpx
import django_idempotency.contrib.client.requests
own = {
    "django_idempotency." + name
    for name in ("contrib", "values", "values.lazily")
}
ours = {name for name in sys.modules if name.startswith("django_idempotency.")} - own
assert all(name.startswith("django_idempotency.contrib.client") for name in ours), ours
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True)
