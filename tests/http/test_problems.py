"""Problem answers: what each one lets a client do, in words that can be translated."""

from __future__ import annotations

import json

import pytest
from django.utils import translation
from django.utils.translation import gettext

from django_idempotency.http.placement import idempotent
from django_idempotency.http.responses import problem_response
from django_idempotency.maintenance.decisions import marked_failed
from django_idempotency.values import exceptions as errors
from django_idempotency.values.keys import parse_key
from django_idempotency.values.outcomes import InFlight, Mismatch, OnHold
from django_idempotency.values.policy import Key
from django_idempotency.values.problems import MARKED_FAILED, problem
from tests.support.views import Runs

REFUSALS = [
    errors.MissingKey(),
    errors.MalformedKey("The Idempotency-Key header is empty.", never_used=True),
    errors.AnonymousKey(),
    errors.ReplayForbidden(),
    errors.NotAdmitted(60),
    errors.StoreUnavailable(),
    errors.StoreConflict(),
    errors.RequestIncomplete(10, 100),
    InFlight(retry_after=7),
    OnHold("its lease ran out"),
    Mismatch(),
]


BASE = "https://example.com/problems/"
RETRY_AFTER = {
    "idempotency_key_in_use": range(7, 11),
    "idempotency_key_not_admitted": range(60, 91),
    "idempotency_store_unavailable": range(1, 3),
}


def members(response):
    return json.loads(response.content)


@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__
)
def test_a_problem_says_what_it_is_and_when_to_come_back(settings, refusal):
    """What it lets a client do, the page on errors says, which tests/unit/test_docs.py
    compares.
    """
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": BASE}
    stated = problem(refusal)
    response = problem_response(stated)
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Link"] == f'<{BASE}{stated.code}>; rel="describedby"'
    told = response.headers.get("Retry-After")
    assert (
        told is None
        if stated.code not in RETRY_AFTER
        else int(told) in RETRY_AFTER[stated.code]
    )
    sent = members(response)
    assert sent.pop("title")
    assert sent.pop("detail")
    given = {
        name: getattr(stated, name)
        for name in ("status", "code", "retryable", "safe_new_key")
    }
    assert sent == {"type": BASE + stated.code, **given}


def test_without_an_address_a_problem_has_the_title_of_http(settings):
    """RFC 9457 section 4.2.1."""
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": None}
    stated = problem(InFlight(1))
    response = problem_response(stated)
    assert "Link" not in response.headers
    sent = members(response)
    assert (sent["type"], sent["title"]) == ("about:blank", "Conflict")
    assert sent["detail"] == f"{stated.title} {stated.detail}"


def in_german(make):
    with translation.override("de"):
        return make()


@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__
)
def test_only_what_is_for_people_changes_with_the_language(
    refusal, monkeypatch, settings
):
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": BASE}
    monkeypatch.setattr("random.randint", lambda low, high: low)  # of Retry-After
    english = problem_response(problem(refusal))
    german = in_german(lambda: problem_response(problem(refusal)))
    assert dict(english.items()) == dict(german.items())
    changed = {
        name for name, told in members(english).items() if members(german)[name] != told
    }
    assert {"title"} <= changed <= {"title", "detail"}
    assert members(english)["title"] != members(english)["detail"]


def test_a_problem_is_in_the_language_that_the_client_accepts(call, settings):
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "django.middleware.locale.LocaleMiddleware",
    ]
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": BASE}
    needed = idempotent(required=True)(Runs().view)
    german, english = (
        members(call(needed, key=None, headers={"Accept-Language": each}))
        for each in ("de", "en")
    )
    assert (
        german["title"]
        == in_german(lambda: gettext(english["title"]))
        != english["title"]
    )


def test_an_error_is_in_english_and_its_problem_is_not():
    def told():
        with pytest.raises(errors.MalformedKey) as raised:
            parse_key("x" * 256)
        return raised.value

    error = in_german(told)
    assert "has 256 characters; at most 255" in str(error)
    assert "hat 256 Zeichen; höchstens 255" in in_german(lambda: problem(error)).detail


def test_an_expired_session_keeps_its_key(call):
    view = idempotent(Runs().view)
    assert call(view).status_code == 200
    call.client.logout()
    told = members(call(view))
    assert (told["code"], told["safe_new_key"], told["retryable"]) == (
        "idempotency_key_anonymous",
        False,
        True,
    )
    assert "same key" in told["detail"]


@pytest.mark.parametrize(
    ("retry", "name", "is_safe"),
    [
        ({"payload": {"amount": 1, "sent_at": 2}, "key": '"k"'}, "reused", False),
        ({"key": '"k", "k"'}, "malformed", False),
        ({"key": '"k'}, "malformed", False),
        ({"key": "k, k"}, "malformed", False),
        ({"key": "k"}, "malformed", False),
        ({"key": ""}, "malformed", True),
        ({"key": f'"{"x" * 256}"'}, "malformed", True),
        ({"key": "\xe9"}, "malformed", True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_new_key_is_offered_only_for_a_key_that_can_not_be_recorded(
    call, retry, name, is_safe
):
    view = idempotent(key=Key(strict=True))(Runs().view)
    assert call(view, key='"k"').status_code == 200
    told = members(call(view, **retry))
    assert (told["code"], told["safe_new_key"]) == (f"idempotency_key_{name}", is_safe)


def test_a_failure_stored_by_an_operator_is_in_the_projects_language():
    in_english = marked_failed(410, "")
    with translation.override("de"):
        assert str(MARKED_FAILED.title) not in in_english.body.decode()
        assert marked_failed(410, "") == in_english
