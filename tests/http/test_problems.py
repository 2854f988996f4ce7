"""Problem answers: what each one lets a client do, in words that can be translated."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from django.http import HttpResponse
from django.utils import translation

from django_idempotency import exceptions as errors
from django_idempotency.decorators import idempotent
from django_idempotency.http.problems import MARKED_FAILED, marked_failed, problem, problem_response
from django_idempotency.outcomes import InFlight, Mismatch, OnHold
from tests.support.callers import is_replay
from tests.support.views import Runs, code

REFUSALS = [
    errors.MissingKey(),
    errors.MalformedKey("The Idempotency-Key header is empty.", never_used=True),
    errors.AnonymousKey(),
    errors.MalformedRequestTime("'x' is no time"),
    errors.LateRetry(),
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


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_title_and_detail_say_different_things(refusal):
    told = members(problem_response(problem(refusal)))
    assert told["title"] != told["detail"]
    assert told["title"].endswith(".")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_when_a_new_key_is_safe(refusal):
    safe = isinstance(refusal, errors.MissingKey | errors.MalformedKey)
    assert problem(refusal).safe_new_key is safe


# --- Retries of an operation that was executed -----------------------------------------------------------------------


def retried(call, view, payload=None, **options):
    first = call(view, {"amount": 1})
    assert (first.status_code, is_replay(first)) == (200, False)
    return lambda: members(call(view, payload or {"amount": 1}, **options))


def test_an_expired_session_keeps_its_key(call):
    retry = retried(call, idempotent(Runs().view))
    call.client.logout()
    told = retry()
    assert (told["code"], told["safe_new_key"], told["retryable"]) == ("idempotency_key_anonymous", False, True)
    assert "same key" in told["detail"]


def test_whose_body_was_rebuilt_is_not_told_that_a_new_key_is_safe(call):
    told = retried(call, idempotent(Runs().view), {"amount": 1, "sent_at": 2})()
    assert (told["code"], told["safe_new_key"]) == ("idempotency_key_reused", False)


@pytest.mark.parametrize("header", ['"k", "k"', '"k', "k, k"])
def test_whose_header_was_garbled_on_the_way_is_not_told_so(call, header):
    told = retried(call, idempotent(Runs().view), key=header)()
    assert (told["code"], told["safe_new_key"]) == ("idempotency_key_malformed", False)


def test_a_key_without_quotes_is_not_safe_to_replace(call):
    view = idempotent(strict_header=True)(Runs().view)
    assert call(view, {"amount": 1}, key='"k"').status_code == 200
    assert members(call(view, {"amount": 1}, key="k"))["safe_new_key"] is False


@pytest.mark.parametrize("header", ["", "x" * 256, "\xe9"])
def test_a_key_that_no_record_can_have_was_never_used(call, header):
    told = members(call(idempotent(Runs().view), key=header))
    assert (told["code"], told["safe_new_key"]) == ("idempotency_key_malformed", True)


# --- Languages -------------------------------------------------------------------------------------------------------


def compiled(translations):
    """The bytes of a ``.mo`` file (GNU gettext, "The Format of GNU MO Files")."""
    pairs = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **translations}.items())
    texts = [[text.encode() + b"\0" for text in side] for side in zip(*pairs, strict=True)]
    offset = 28 + 16 * len(pairs)
    tables, data = b"", b""
    for side in texts:
        for text in side:
            tables += struct.pack("<II", len(text) - 1, offset + len(data))
            data += text
    return struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0) + tables + data


@pytest.fixture
def german(settings, tmp_path: Path):
    """What a project's own catalogue does to a text."""

    def teach(translations):
        folder = tmp_path / "de" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "django.mo").write_bytes(compiled(translations))
        settings.LOCALE_PATHS = [str(tmp_path)]
        translation.trans_real._translations.clear()
        return translation.override("de")

    yield teach
    translation.trans_real._translations.clear()


def test_titles_and_details_are_translated(german):
    untranslated = [members(problem_response(problem(refusal))) for refusal in REFUSALS]
    fixed = {told["title"]: f"Titel {told['code']}" for told in untranslated}
    fixed |= {told["detail"]: f"Einzelheit {told['code']}" for told in untranslated}
    with german(fixed):
        translated = [members(problem_response(problem(refusal))) for refusal in REFUSALS]
    assert [told["title"] for told in translated] == [f"Titel {told['code']}" for told in translated]
    details = {told["code"]: told["detail"] for told in translated}
    for name in ("missing", "anonymous", "in_use", "reused"):
        assert details[f"idempotency_key_{name}"] == f"Einzelheit idempotency_key_{name}"


def test_what_an_operator_stores_is_in_the_language_of_the_project(german):
    in_english = marked_failed(410, "")
    with german({str(MARKED_FAILED.title): "Gescheitert.", str(MARKED_FAILED.detail): "Fragen Sie nach."}):
        assert str(MARKED_FAILED.title) == "Gescheitert."
        assert marked_failed(410, "") == in_english


def test_a_response_of_the_view_is_none_of_ours(call):
    view = idempotent(lambda request: HttpResponse("x"))
    assert code(call(view)) is None
