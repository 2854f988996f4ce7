"""A replay is what the first caller got; our own answers say what to do next."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from hypothesis import strategies as st

from django_idempotency import engine
from django_idempotency.http.placement import idempotent
from django_idempotency.http.responses import replay, stored
from django_idempotency.http.verdicts import verdict_for
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import DigestCollision
from django_idempotency.values.outcomes import (
    Fail,
    Keep,
    Operation,
    Release,
    StoredResponse,
)
from django_idempotency.values.policy import Atomic, Body, Policy
from django_idempotency.values.problems import problem
from django_idempotency.values.response_headers import is_about_caching, may_be_stored
from tests.support.callers import OF_A_REPLAY, entry_point, is_replay
from tests.support.properties import given
from tests.support.views import Runs

# What Django lets into a header: no line breaks, nothing beyond Latin-1.
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,8}", fullmatch=True)
VALUES = st.text(
    st.characters(max_codepoint=255, exclude_characters="\0\r\n"), max_size=12
)
COOKIES = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"),
    max_size=12,
)


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
    kept = {
        name: value
        for name, value in answer.items()
        if may_be_stored(name) and not is_about_caching(name.lower())
    }
    assert (replayed.status_code, replayed.content) == (status, body)
    assert dict(replayed.items()) == {**kept, **OF_A_REPLAY}
    assert replayed.cookies.output() == answer.cookies.output()


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
    view = idempotent(body=Body(limit=4))(
        Runs(lambda request: HttpResponse("four")).view
    )
    assert [call(view).content for _ in range(2)] == [b"four"] * 2


def test_the_response_of_a_template_error_is_not_stored(call):
    call.client.raise_request_exception = False
    broken = engines["django"].from_string("{% include missing %}")
    runs = Runs(lambda request: TemplateResponse(request, broken, {}))
    view = idempotent(runs.view)
    assert [call(view).status_code for _ in range(2)] == [500, 500]
    assert runs.count == 2


@pytest.mark.parametrize(
    "odd", [{"headers": {"X Odd": "1"}}, {"headers": {"X-Odd:": "1"}}], ids=str
)
def test_a_header_that_servers_refuse_does_not_break_a_replay(transactional_db, odd):
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
    assert (
        again.status_code,
        again.content,
        again["X-A"],
        "Content-Type" in again,
    ) == (status, b"", "b", False)


RELEASED = (400, 401, 403, 404, 405, 406, 415, 422, 429)


@pytest.mark.parametrize(
    "status", [200, 201, 204, 302, 402, 409, 410, 418, 451, 500, 503, 599, *RELEASED]
)
@pytest.mark.parametrize("on_release", ["neutral", "rollback"])
def test_a_status_is_kept_released_or_failed_by_the_policy(status, on_release):
    answer = StoredResponse(status)
    if status in RELEASED:
        expected = Release(rollback=on_release == "rollback")
    elif status >= 500:
        expected = Fail(f"status {status}")
    else:
        expected = Keep(answer, failure=status >= 400)
    assert verdict_for(answer, Policy(mode=Atomic(on_release=on_release))) == expected


def test_a_view_can_have_other_statuses_released_or_retried():
    policy = Policy(release_statuses=[409], retry_statuses=[418])
    assert verdict_for(StoredResponse(409), policy) == Release()
    assert verdict_for(StoredResponse(418), policy) == Fail("status 418")
    assert verdict_for(StoredResponse(404), policy) == Keep(
        StoredResponse(404), failure=True
    )
    assert verdict_for(StoredResponse(500), policy) == Keep(
        StoredResponse(500), failure=True
    )


def test_an_error_without_a_problem_response_is_raised():
    with pytest.raises(DigestCollision):
        problem(DigestCollision())


def test_hop_by_hop_headers_date_and_length_are_not_stored():
    hop_by_hop = {
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
    names = {"age", "content-length", "date"} | hop_by_hop
    response = HttpResponse(
        "x", headers={name.title(): "1" for name in names} | {"X-Kept": "1"}
    )
    assert dict(stored(response, Policy()).headers).keys() == {"Content-Type", "X-Kept"}
