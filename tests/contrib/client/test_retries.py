"""When a client sends a request again: by what it got, and by what is left of its attempts and of its time."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.http.response import ResponseHeaders

from django_idempotency.contrib.client import Retries
from django_idempotency.contrib.client import retries as module
from django_idempotency.contrib.client.retries import Advice, Call, advice, retry_after
from django_idempotency.http.problems import problem, problem_response
from tests.unit.test_docs import REFUSALS

ROOT = Path(__file__).parents[3]
PROBLEM = {"Content-Type": "application/problem+json"}
REFUSED = (400, PROBLEM, json.dumps({"retryable": False, "safe_new_key": True}).encode())


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


def begun(method="POST", headers=(), **options):
    return Call(Retries(**options), method, ResponseHeaders(headers))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_call_gets_a_key_of_its_own(method):
    first, second = (begun(method).headers["Idempotency-Key"] for _ in range(2))
    assert first != second
    assert first.startswith('"')
    assert len(first) == 38


def test_a_key_of_the_callers_is_kept():
    call = begun(headers={"idempotency-key": '"mine"'})
    assert call.headers["Idempotency-Key"] == '"mine"'
    assert call.after_response(*REFUSED) is None
    assert call.headers["Idempotency-Key"] == '"mine"'


def test_a_new_key_is_made_once_if_the_server_says_that_it_is_safe():
    call = begun()
    key = call.headers["Idempotency-Key"]
    assert call.after_response(*REFUSED) == 0
    assert call.headers["Idempotency-Key"] not in (key, "")
    assert call.after_response(*REFUSED) is None


def test_a_new_key_is_never_made_after_an_attempt_that_may_have_succeeded():
    call = begun(first_wait=0)
    key = call.headers["Idempotency-Key"]
    assert call.after_failure() == 0
    assert call.after_response(*REFUSED) is None
    assert call.headers["Idempotency-Key"] == key


def test_a_key_that_was_missing_is_made():
    call = begun(methods=())
    assert not call.keyed
    assert call.after_response(*REFUSED) == 0
    assert call.keyed


@pytest.mark.parametrize(
    ("method", "methods", "repeated"),
    [
        ("GET", (), True),
        ("PUT", (), True),
        ("DELETE", (), True),
        ("POST", (), False),
        ("PATCH", (), False),
        ("POST", ("POST",), True),
        ("PATCH", ("PATCH",), True),
    ],
)
def test_a_post_is_repeated_only_with_a_key(method, methods, repeated):
    for end in (lambda call: call.after_failure(), lambda call: call.after_response(503, ResponseHeaders({}))):
        assert (end(begun(method, methods=methods)) is not None) is repeated


@pytest.mark.parametrize(
    ("statuses", "said", "expected"),
    [
        ([408, 425, 429, 500, 502, 503, 504], None, Advice.RETRY),
        ([200, 201, 302, 400, 401, 402, 404, 409, 410, 422], None, Advice.TAKE),
        ([409, 503], "true", Advice.RETRY),
        ([409, 503], "false", Advice.TAKE),
        ([409], "maybe", Advice.TAKE),
    ],
)
def test_x_should_retry_decides_or_else_the_status(statuses, said, expected):
    headers = {} if said is None else {"X-Should-Retry": said}
    assert {advice(status, headers) for status in statuses} == {expected}


def advised_by(problem):
    if problem.retryable:
        return Advice.TAKE if problem.code == "idempotency_key_anonymous" else Advice.RETRY
    return Advice.NEW_KEY if problem.safe_new_key else Advice.TAKE


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_each_of_our_problems_is_understood(refusal):
    ours = problem(refusal)
    response = problem_response(ours)
    assert advice(ours.status, response.headers, response.content) is advised_by(ours)


def test_a_missing_key_advises_a_new_key_and_a_key_in_use_a_retry():
    advised = {ours.code: advised_by(ours) for ours in map(problem, REFUSALS)}
    assert [code for code, advised in advised.items() if advised is Advice.NEW_KEY] == ["idempotency_key_missing"]
    assert {"idempotency_key_in_use", "idempotency_store_unavailable"} <= {
        code for code, advised in advised.items() if advised is Advice.RETRY
    }


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_a_problem_has_x_should_retry_for_other_clients(refusal):
    ours = problem(refusal)
    expected = "true" if ours.retryable else "false"
    if ours.retryable and ours.retry_after is None:  # the caller has to do something, or to send all of it
        expected = None
    assert problem_response(ours).headers.get("X-Should-Retry") == expected


NOTHING_SAID = [b"", b"[]", b"{", b"null", b"[" * 100_000, b'"retryable"', b'{"retryable": "yes"}', b"\xff"]


@pytest.mark.parametrize("body", NOTHING_SAID)
def test_a_problem_that_says_nothing_goes_by_its_status(body):
    assert (advice(409, PROBLEM, body), advice(503, PROBLEM, body)) == (Advice.TAKE, Advice.RETRY)


def test_a_problem_is_recognised_by_its_media_type_in_any_case():
    headers = {"Content-Type": "Application/Problem+JSON; charset=utf-8"}
    assert advice(503, headers, b'{"retryable": false}') is Advice.TAKE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("0", 0),
        ("Wed, 01 Jan 2025 00:00:09 GMT", 9),
        ("Tue, 31 Dec 2024 00:00:00 GMT", 0),
        ("soon", None),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("٧", None),
        ("Wed, 99 Jan 2025 00:00:09 GMT", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    assert retry_after({"Retry-After": value}, lambda: datetime(2025, 1, 1, tzinfo=UTC)) == seconds


def test_a_date_is_compared_with_the_date_of_the_response():
    headers = {"Retry-After": "Wed, 01 Jan 2025 00:00:09 GMT", "Date": "Wed, 01 Jan 2025 00:00:05 GMT"}
    assert retry_after(headers, lambda: datetime(2030, 1, 1, tzinfo=UTC)) == 4


def test_waits_double_up_to_the_longest():
    call = begun(attempts=9, first_wait=1, longest_wait=4)
    waits = [call.after_failure() for _ in range(4)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 4, 4), strict=True)), waits


def test_waits_are_the_longest_however_many_attempts():
    call = begun(attempts=3000, total=1e9, longest_wait=4)
    assert max(call.after_failure() for _ in range(2999)) <= 4


def test_a_longer_retry_after_is_obeyed_and_a_shorter_one_waited_out():
    assert begun().after_response(503, ResponseHeaders({"retry-after": "50"})) == 50
    assert begun(first_wait=8).after_response(503, ResponseHeaders({"retry-after": "1"})) >= 4


def test_attempts_are_capped():
    call = begun(attempts=3, first_wait=0)
    assert [call.after_failure() for _ in range(3)] == [0, 0, None]


def test_an_attempt_never_begins_after_the_total_time(clock):
    call = begun(total=10, first_wait=0)
    clock.now = 9.9
    assert call.after_failure() == 0
    assert call.after_response(503, ResponseHeaders({"Retry-After": "1"})) is None, "it would begin at 10.9"
    clock.now = 10.1
    assert call.after_failure() is None


@pytest.mark.http_clients
def test_the_client_imports_neither_django_nor_the_rest_of_the_package():
    program = """
import sys
sys.modules["django"] = sys.modules["http_sf"] = None
import django_idempotency.contrib.client.httpx, django_idempotency.contrib.client.requests
own = {"django_idempotency.contrib", "django_idempotency.values", "django_idempotency.values.lazily"}
ours = {name for name in sys.modules if name.startswith("django_idempotency.")} - own
assert all(name.startswith("django_idempotency.contrib.client") for name in ours), ours
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True)
