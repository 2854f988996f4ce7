"""What of a response is kept for replays and from caches, what an operator may give,
and what damage replays.
"""

from __future__ import annotations

import json

import pytest
from django.http import HttpResponse, JsonResponse

from django_idempotency.http.placement import idempotent
from django_idempotency.http.responses import replay
from django_idempotency.maintenance.decisions import Refusal, resolve
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import OnHold, StoredResponse
from django_idempotency.values.problems import problem
from django_idempotency.values.response_headers import FILE_HEADERS
from tests.support.callers import is_replay
from tests.support.views import Runs, code

CACHED = {
    "Cache-Control": "public, max-age=600",
    "CDN-Cache-Control": "max-age=600",
    "Expires": "Wed, 21 Oct 2099 07:28:00 GMT",
    "Surrogate-Control": "max-age=600",
}


@pytest.mark.parametrize("header", sorted(FILE_HEADERS))
def test_a_file_that_the_server_sends_is_not_replayed(call, header):
    runs = Runs(
        lambda request: HttpResponse(
            status=201, headers={header: "/private/7.pdf", "X-Kept": "1"}
        )
    )
    view = idempotent(runs.view)
    first, second = call(view), call(view)
    assert first.headers[header] == "/private/7.pdf"
    assert (second.status_code, code(second), is_replay(second)) == (
        201,
        "response_not_stored",
        True,
    )
    assert (header in second.headers, second.headers["X-Kept"], runs.count) == (
        False,
        "1",
        1,
    )
    assert "/private/" not in str(IdempotencyRecord.objects.get().response_headers)


def test_instructions_to_the_server_are_left_out(call):
    view = idempotent(
        lambda request: HttpResponse(
            "ok", headers={"X-Accel-Expires": "600", "Age": "7"}
        )
    )
    call(view)
    second = call(view)
    assert second.content == b"ok"
    assert not {"X-Accel-Expires", "Age"} & set(second.headers)


def test_a_replay_is_kept_from_caches(call):
    view = idempotent(lambda request: JsonResponse({}, headers=CACHED))
    first, second = call(view), call(view)
    assert first.headers["Cache-Control"] == CACHED["Cache-Control"]
    assert {name: second.headers.get(name) for name in CACHED} == dict.fromkeys(
        CACHED
    ) | {"Cache-Control": "no-store"}


def test_a_problem_in_place_of_a_body_is_not_cacheable():
    replayed = replay(StoredResponse(201, tuple(CACHED.items()), None))
    assert (code(replayed), replayed.headers["Cache-Control"]) == (
        "response_not_stored",
        "no-store",
    )
    assert "Expires" not in replayed.headers


def test_a_problem_is_kept_from_caches(call):
    view = idempotent(required=True)(Runs().view)
    assert call(view, key=None).headers["Cache-Control"] == "no-store"


def test_the_reason_of_a_hold_is_not_for_clients():
    told = problem(OnHold("DatabaseError in shop.payments on 10.0.0.7")).members(None)
    assert not [
        text for text in told.values() if "shop" in str(text) or "10.0.0.7" in str(text)
    ]


@pytest.fixture
def failed(call):
    """The id of a record whose run has failed, and its view, which would pay."""
    runs = Runs(lambda request: HttpResponse(status=503))
    view = idempotent(runs.view)
    call(view)
    return IdempotencyRecord.objects.get().pk, view


@pytest.mark.parametrize(
    "kind",
    ["application/json", "application/problem+json", "text/plain; charset=utf-8"],
)
def test_a_response_given_by_hand_is_data_to_a_browser(call, failed, kind):
    id, view = failed
    assert not isinstance(
        resolve(id, StoredResponse(200, (("Content-Type", kind),), b"7")), Refusal
    )
    replayed = call(view)
    assert (replayed.content, replayed.headers["Content-Type"]) == (b"7", kind)
    assert replayed.headers["Content-Security-Policy"] == "sandbox"
    assert replayed.headers["X-Content-Type-Options"] == "nosniff"


KINDS = [
    (("Content-Type", "text/html"),),
    (("Content-Type", "image/svg+xml"),),
    (("Content-Type", "application/json"), ("content-type", "text/html")),
    (),
]


@pytest.mark.parametrize("headers", KINDS, ids=str)
def test_a_response_given_by_hand_is_not_a_page(failed, headers):
    with pytest.raises(ValueError, match="RESOLVE_CONTENT_TYPES"):
        resolve(failed[0], StoredResponse(200, headers, b"<script>"))
    assert IdempotencyRecord.objects.get().response_status is None


def test_a_project_may_allow_other_types_by_hand(call, failed, settings):
    settings.IDEMPOTENCY = {"RESOLVE_CONTENT_TYPES": ["text/csv"]}
    resolve(failed[0], StoredResponse(200, (("Content-Type", "text/csv"),), b"7"))
    assert call(failed[1]).headers["Content-Type"] == "text/csv"


@pytest.mark.parametrize(
    "header", ["X-Accel-Redirect", "X-Sendfile", "Set-Cookie", "Authorization"]
)
def test_a_header_that_is_never_stored_is_not_given_by_hand(failed, header):
    with pytest.raises(ValueError, match=f"{header}, which is never stored"):
        resolve(failed[0], StoredResponse(204, ((header, "/private/7.pdf"),), b""))


DAMAGED = [
    {},
    "text",
    7,
    True,
    [1],
    ["Content-Type"],
    [["Content-Type"]],
    [["Content-Type", 7]],
    [["Content-Type", None]],
    [["a", "b", "c"]],
    [["X-Split", "a\r\nSet-Cookie: b"]],
    [["X Space", "a"]],
    [["X-Wide", "\N{SNOWMAN}"]],
    [["", "a"]],
    [[":encrypted", 7]],
    [[":encrypted"]],
]


def damage(headers):
    assert IdempotencyRecord.objects.update(response_headers=headers) == 1


@pytest.mark.parametrize("headers", DAMAGED, ids=json.dumps)
def test_damaged_headers_replay_as_not_stored(call, headers):
    runs = Runs(lambda request: HttpResponse("x", status=201))
    view = idempotent(store_cookies=True)(runs.view)
    call(view)
    damage(headers)
    replayed = call(view)
    assert (replayed.status_code, code(replayed), is_replay(replayed)) == (
        201,
        "response_not_stored",
        True,
    )
    assert runs.count == 1
