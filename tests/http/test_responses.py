"""A replay is what the first caller got; our own answers say what to do next."""

from __future__ import annotations

import io
import json
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.http import (
    FileResponse,
    HttpResponse,
    HttpResponsePermanentRedirect,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from hypothesis import strategies as st

from django_idempotency import engine
from django_idempotency.decorators import idempotent
from django_idempotency.exceptions import (
    AnonymousKey,
    DigestCollision,
    MalformedKey,
    MissingKey,
    NotAdmitted,
    ReplayForbidden,
    RequestIncomplete,
    StoreConflict,
    StoreUnavailable,
)
from django_idempotency.http.problems import problem, problem_response
from django_idempotency.http.responses import UNSTORED_HEADERS, is_about_caching, may_be_stored, replay, stored
from django_idempotency.http.verdicts import verdict_for
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic, Body, Policy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import (
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Release,
    StoredResponse,
)
from tests.support.callers import OF_A_REPLAY, entry_point, is_replay
from tests.support.properties import given
from tests.support.views import Runs, code


def bare_204(request):
    response = HttpResponse(status=204)
    del response.headers["Content-Type"]
    return response


def template(request):
    return TemplateResponse(request, engines["django"].from_string("<p>{{ name }}: {{ n }}</p>"), {"name": "é", "n": 7})


def headed(request):
    headers = {"ETag": '"v1"', "Vary": "Accept, X-Tenant", "Cache-Control": "no-store", "X-Odd": "ü", "Location": "/7/"}
    return HttpResponse("x", headers=headers, status=201)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: HttpResponse("é", content_type="text/plain; charset=latin-1"),
        lambda request: HttpResponse(iter(["a", b"\0", "c"])),
        lambda request: HttpResponse(),
        lambda request: HttpResponsePermanentRedirect("https://example.com/é"),
        bare_204,
        template,
        headed,
    ],
)
def test_a_replay_of_an_unusual_response_is_what_the_first_caller_got(call, answer):
    runs = Runs(answer)
    view = idempotent(runs.view)
    first, second = call(view), call(view)
    assert runs.count == 1
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert dict(second.headers) == {**first.headers, **OF_A_REPLAY}
    assert not is_replay(first)


# What Django lets into a header: no line breaks, nothing beyond Latin-1.
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(max_codepoint=255, exclude_characters="\0\r\n"), max_size=12)
COOKIES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12)


@pytest.mark.django_db
@given(
    st.integers(200, 499),
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.binary(max_size=200),
    st.dictionaries(NAMES, COOKIES, max_size=2),
)
def test_a_replay_equals_the_response_to_the_byte(status, headers, body, cookies):
    policy = Policy(store_cookies=True)
    answer = HttpResponse(body, status=status, headers=headers)
    for name, value in cookies.items():
        answer.set_cookie(name, value, max_age=60, httponly=True)
    claimed = engine.claim(Operation("s", uuid4().hex, b"f" * 32), policy)
    store = store_for(policy)
    assert store.complete(claimed, stored(answer, policy))
    replayed = replay(store.read(claimed.id).response)
    kept = {name: value for name, value in answer.items() if may_be_stored(name) and not is_about_caching(name.lower())}
    assert (replayed.status_code, replayed.content) == (status, body)
    assert dict(replayed.items()) == {**kept, **OF_A_REPLAY}
    assert replayed.cookies.output() == answer.cookies.output()


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: StreamingHttpResponse(iter([b"a", b"b"]), status=201, headers={"X-Kept": "1"}),
        lambda request: FileResponse(io.BytesIO(b"ab"), as_attachment=True, filename="f.bin", headers={"X-Kept": "1"}),
        lambda request: HttpResponse("ab" * 6, headers={"X-Kept": "1", "ETag": '"e"'}),
    ],
    ids=["streaming", "file", "oversize"],
)
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_an_unstored_response_is_never_run_again(call, answer, mode):
    runs = Runs(answer)
    view = idempotent(mode=mode, body=Body(limit=11))(runs.view)
    first = call(view)
    assert (first.getvalue() if first.streaming else first.content) in (b"ab", b"ab" * 6), "the first caller has it all"
    second = call(view)
    assert runs.count == 1
    assert (second.status_code, code(second), is_replay(second)) == (first.status_code, "response_not_stored", True)
    assert json.loads(second.content)["status"] == first.status_code
    assert second.headers["X-Kept"] == "1"
    assert not {"ETag", "Content-Disposition"} & set(second.headers)


def test_a_stream_is_not_read_before_the_client_reads_it(call):
    read = []

    def stream():
        read.append(True)
        yield b"x"

    view = idempotent(lambda request: StreamingHttpResponse(stream()))
    response = call(view)
    assert IdempotencyRecord.objects.get().status == "completed"
    assert not read
    assert response.getvalue() == b"x"


def test_a_body_of_exactly_the_limit_is_stored(call):
    view = idempotent(body=Body(limit=4))(Runs(lambda request: HttpResponse("four")).view)
    assert [call(view).content for _ in range(2)] == [b"four"] * 2


def test_a_template_error_stores_no_response(call):
    call.client.raise_request_exception = False
    broken = engines["django"].from_string("{% include missing %}")
    runs = Runs(lambda request: TemplateResponse(request, broken, {}))
    view = idempotent(runs.view)
    assert [call(view).status_code for _ in range(2)] == [500, 500]
    assert runs.count == 2


@pytest.mark.parametrize("odd", [{"headers": {"X Odd": "1"}}, {"headers": {"X-Odd:": "1"}}], ids=str)
def test_a_header_that_no_server_sends_costs_no_replay(transactional_db, odd):
    submit = entry_point(lambda request: HttpResponse("x", status=201, **odd))
    submit()
    again = submit()
    assert (again.status_code, again.content, is_replay(again)) == (201, b"x", True)


def cookie_of_a_surrogate():
    response = HttpResponse(status=402)
    response.set_cookie("last", "\ud800")
    return response


def test_a_lone_surrogate_undoes_nothing_that_the_view_wrote(transactional_db):
    def view(request):
        get_user_model().objects.create(username="written")
        return cookie_of_a_surrogate()

    submit = entry_point(view, store_cookies=True)
    assert [submit().status_code for _time in range(2)] == [402, 402]
    assert get_user_model().objects.filter(username="written").exists()


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_response_without_a_body_has_none_as_a_replay(status):
    again = replay(StoredResponse(status, (("X-A", "b"),), None))
    assert (again.status_code, again.content, again["X-A"], "Content-Type" in again) == (status, b"", "b", False)


RELEASED = (400, 401, 403, 404, 405, 406, 415, 422, 429)


@pytest.mark.parametrize("status", [200, 201, 204, 302, 402, 409, 410, 418, 451, 500, 503, 599, *RELEASED])
@pytest.mark.parametrize("on_release", ["neutral", "rollback"])
def test_a_status_is_kept_released_or_failed_by_the_policy(status, on_release):
    answer = StoredResponse(status)
    if status in RELEASED:
        expected = Release(rollback=on_release == "rollback")
    elif status >= 500:
        expected = Fail(f"status {status}")
    else:
        expected = Keep(answer, failure=status >= 400)
    assert verdict_for(status, Policy(mode=Atomic(on_release=on_release)), lambda: answer) == expected


def test_a_view_can_have_other_statuses_released_or_retried():
    policy = Policy(release_statuses=[409], retry_statuses=[418])
    assert verdict_for(409, policy, lambda: StoredResponse(409)) == Release()
    assert verdict_for(418, policy, lambda: StoredResponse(418)) == Fail("status 418")
    assert verdict_for(404, policy, lambda: StoredResponse(404)) == Keep(StoredResponse(404), failure=True)
    assert verdict_for(500, policy, lambda: StoredResponse(500)) == Keep(StoredResponse(500), failure=True)


@pytest.mark.parametrize(
    ("refusal", "status", "name", "retryable", "safe_new_key", "retry_after"),
    [
        (RequestIncomplete(10, 100), 400, "request_incomplete", True, False, None),
        (MalformedKey("no good", never_used=True), 400, "idempotency_key_malformed", False, True, None),
        (MissingKey(), 400, "idempotency_key_missing", False, True, None),
        (MalformedKey("no good"), 400, "idempotency_key_malformed", False, False, None),
        (AnonymousKey(), 400, "idempotency_key_anonymous", True, False, None),
        (InFlight(7), 409, "idempotency_key_in_use", True, False, range(7, 11)),
        (OnHold("why"), 409, "idempotency_key_on_hold", False, False, None),
        (ReplayForbidden(), 403, "replay_forbidden", False, False, None),
        (NotAdmitted(60), 429, "idempotency_key_not_admitted", True, False, range(60, 91)),
        (Mismatch(), 422, "idempotency_key_reused", False, False, None),
        (StoreUnavailable(), 503, "idempotency_store_unavailable", True, False, range(1, 3)),
        (StoreConflict(), 503, "idempotency_store_unavailable", True, False, range(1, 3)),
    ],
)
def test_a_problem_says_what_it_is_and_what_to_do(
    settings, refusal, status, name, retryable, safe_new_key, retry_after
):
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE_URL": "https://example.com/problems/"}
    response = problem_response(problem(refusal))
    members = json.loads(response.content)
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Link"] == f'<https://example.com/problems/{name}>; rel="describedby"'
    told = response.headers.get("Retry-After")
    assert told is None if retry_after is None else int(told) in retry_after
    assert members.pop("title")
    assert members.pop("detail")
    assert members == {
        "type": f"https://example.com/problems/{name}",
        "status": status,
        "code": name,
        "retryable": retryable,
        "safe_new_key": safe_new_key,
    }


def test_an_error_that_is_nobodys_response_is_raised():
    with pytest.raises(DigestCollision):
        problem(DigestCollision())


def test_hop_by_hop_headers_date_and_length_are_not_stored():
    names = UNSTORED_HEADERS - {"set-cookie"}
    response = HttpResponse("x", headers={name.title(): "1" for name in names} | {"X-Kept": "1"})
    assert dict(stored(response, Policy()).headers).keys() == {"Content-Type", "X-Kept"}
