"""Problem responses in the language of the request. What programs read, and what is stored, never changes with it."""

from __future__ import annotations

import json

import pytest
from django.http import HttpResponse
from django.utils import translation
from django.utils.translation import gettext

from django_idempotency import exceptions as errors
from django_idempotency.decorators import idempotent
from django_idempotency.http.problems import NOT_STORED, problem, problem_response
from django_idempotency.policy import Fingerprint
from django_idempotency.values.keys import parse_key
from tests.http.test_problems import REFUSALS
from tests.support.callers import is_replay
from tests.support.views import Runs, api_class, code

GERMAN = {"Accept-Language": "de"}


@pytest.fixture(autouse=True)
def by_the_request(settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]


def members(response):
    return json.loads(response.content)


def in_german(make):
    with translation.override("de"):
        return make()


@pytest.mark.parametrize("problem_of", [*REFUSALS, NOT_STORED], ids=lambda refusal: type(refusal).__name__)
def test_only_what_is_for_people_changes_with_the_language(problem_of, monkeypatch):
    monkeypatch.setattr("random.randint", lambda low, high: low)  # of Retry-After

    def response():
        return problem_response(problem_of if problem_of is NOT_STORED else problem(problem_of))

    english, german = response(), in_german(response)
    assert dict(english.items()) == dict(german.items())
    changed = {name for name, told in members(english).items() if members(german)[name] != told}
    assert {"title"} <= changed <= {"title", "detail"}


@pytest.mark.parametrize("door", ["decorator", "middleware", pytest.param("REST framework", marks=pytest.mark.drf)])
def test_a_problem_is_in_the_language_that_the_client_accepts(call, door):
    needed = {
        "decorator": lambda: idempotent(required=True)(Runs().view),
        "middleware": lambda: Runs().view,
        "REST framework": lambda: idempotent(required=True, scope="public")(api_class(Runs().view)).as_view(),
    }[door]()
    key = '"unfinished' if door == "middleware" else None
    asked = {language: call(needed, key=key, headers={"Accept-Language": language}) for language in ("de", "en", "xx")}
    assert [response.status_code for response in asked.values()] == [400] * 3
    german, english, other = map(members, asked.values())
    assert german["title"] == in_german(lambda: gettext(english["title"])) != english["title"]
    assert (german["code"], german["type"], other) == (english["code"], english["type"], english)
    assert asked["de"].headers["Content-Language"] == "de"


def test_a_stored_language_is_that_of_the_response(call):
    def answer(request):
        return HttpResponse(gettext("Response"), headers={"Content-Language": translation.get_language()})

    view = idempotent(fingerprint=Fingerprint(headers=["Accept-Language"]))(Runs(answer).view)
    assert call(view, {"amount": 1}, headers=GERMAN).headers["Content-Language"] == "de"
    assert call(view, {"amount": 1}, headers=GERMAN).headers["Content-Language"] == "de"
    assert code(call(view, {"amount": 1}, headers={"Accept-Language": "en"})) == "idempotency_key_reused"
    view = idempotent(Runs(answer).view)
    call(view, {"amount": 1}, key="other", headers=GERMAN)
    again = call(view, {"amount": 1}, key="other", headers={"Accept-Language": "en"})
    assert (again.content, again.headers["Content-Language"], is_replay(again)) == (b"Antwort", "de", True)


@pytest.mark.parametrize(
    ("parse", "header", "english", "german"),
    [
        (parse_key, "x" * 256, "has 256 characters; at most 255", "hat 256 Zeichen; höchstens 255"),
        (parse_key, "50%-off\xe9", r"key '50%-off\xe9' contains", r"Idempotenzschlüssel '50%-off\xe9' enthält"),
        (parse_key, '"unfinished', "is not one quoted string", "keine einzelne Zeichenkette"),
    ],
)
def test_an_error_is_in_english_and_its_problem_is_not(parse, header, english, german):
    def told():
        with pytest.raises(errors.MalformedKey) as raised:
            parse(header)
        return raised.value

    error = in_german(told)
    assert english in str(error)
    assert english in problem(error).detail
    assert german in in_german(lambda: problem(error)).detail


def test_an_error_without_a_text_has_none_in_any_language():
    told = in_german(lambda: problem(errors.MalformedKey()).members())
    assert told["detail"] == told["title"]


def test_a_text_of_the_project_is_passed_on_as_it_is():
    assert in_german(lambda: problem(errors.MalformedKey("100% wrong"))).detail == "100% wrong"
