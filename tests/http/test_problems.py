"""Problem answers: what each one lets a client do, in words that can be translated."""

from __future__ import annotations

import json

import pytest
from django.utils import translation
from django.utils.translation import gettext

from django_idempotency import exceptions as errors
from django_idempotency.decorators import idempotent
from django_idempotency.http.problems import MARKED_FAILED, marked_failed, problem, problem_response
from django_idempotency.policy import Keys
from django_idempotency.values.keys import parse_key
from django_idempotency.values.outcomes import InFlight, Mismatch, OnHold
from tests.support.views import Runs

REFUSALS = [
    errors.MissingKey(),
    errors.MalformedKey("The Idempotency-Key header is empty.", never_used=True),
    errors.AnonymousKey(),
    errors.ReplayForbidden(),
    errors.NotAdmitted(1),
    errors.StoreUnavailable(),
    errors.RequestIncomplete(10, 100),
    InFlight(retry_after=1),
    OnHold("its lease ran out"),
    Mismatch(),
]


def members(response):
    return json.loads(response.content)


def in_german(make):
    with translation.override("de"):
        return make()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_only_what_is_for_people_changes_with_the_language(refusal, monkeypatch):
    monkeypatch.setattr("random.randint", lambda low, high: low)  # of Retry-After
    english = problem_response(problem(refusal))
    german = in_german(lambda: problem_response(problem(refusal)))
    assert dict(english.items()) == dict(german.items())
    changed = {name for name, told in members(english).items() if members(german)[name] != told}
    assert {"title"} <= changed <= {"title", "detail"}
    assert members(english)["title"] != members(english)["detail"]


def test_a_problem_is_in_the_language_that_the_client_accepts(call, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    needed = idempotent(required=True)(Runs().view)
    german, english = (members(call(needed, key=None, headers={"Accept-Language": each})) for each in ("de", "en"))
    assert german["title"] == in_german(lambda: gettext(english["title"])) != english["title"]


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
    assert (told["code"], told["safe_new_key"], told["retryable"]) == ("idempotency_key_anonymous", False, True)
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
def test_a_new_key_is_offered_only_for_a_key_that_no_record_can_have(call, retry, name, is_safe):
    view = idempotent(keys=Keys(strict=True))(Runs().view)
    assert call(view, key='"k"').status_code == 200
    told = members(call(view, **retry))
    assert (told["code"], told["safe_new_key"]) == (f"idempotency_key_{name}", is_safe)


def test_a_failure_stored_by_an_operator_is_in_the_projects_language():
    in_english = marked_failed(410, "")
    with translation.override("de"):
        assert str(MARKED_FAILED.title) not in in_english.body.decode()
        assert marked_failed(410, "") == in_english
