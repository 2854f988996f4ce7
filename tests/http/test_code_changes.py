"""docs/code_changes.md says what a retry gets when the code has changed since the first request."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from django.http import HttpResponse, JsonResponse
from django.test import override_settings

from django_idempotency.decorators import idempotent
from django_idempotency.policy import Body, Fingerprint, Keys
from tests.support.pages import rows, text

pytestmark = pytest.mark.usefixtures("transactional_db")


def send(rf, view, *, key, path="/orders/", body=None, **headers):
    body = body or {"item": "book", "sent_at": 1}
    return view(
        rf.post(path, json.dumps(body), "application/json", headers={"Idempotency-Key": key, **headers}),
    )


def view(respond=lambda request: JsonResponse({"order": str(uuid4())}, status=201), **policy):
    return idempotent(**{"scope": "public", "keys": Keys(min_length=16)} | policy)(respond)


def strict(request):
    if "currency" not in json.loads(request.body):
        return JsonResponse({"currency": "This field is required."}, status=400)
    return JsonResponse({"order": 1, "currency": "EUR"}, status=201)


def broken(request):
    return HttpResponse(status=500)


# By the first cell of the page's table: the view before and after the change, and how the retry is sent.
CHANGES = {
    "the view's code, or the shape of its response": (
        view(),
        view(lambda request: JsonResponse({"data": {}}, status=200)),
        {},
    ),
    "a field that requests need now": (view(), view(strict), {}),
    "the first request was refused with 400, and its key released": (view(strict), view(), {}),
    "the first request failed with 500": (view(broken), view(), {}),
    "the path": (view(), view(), {"path": "/v2/orders/"}),
    "`Fingerprint.exclude`, `Fingerprint.only` or a callable": (
        view(),
        view(fingerprint=Fingerprint(exclude=["sent_at"])),
        {},
    ),
    "`Fingerprint.headers`": (
        view(),
        view(fingerprint=Fingerprint(headers=["Stripe-Account"])),
        {"Stripe-Account": "a"},
    ),
    "`scope`": (view(), view(scope=lambda request: "tenant:1"), {}),
    "`mode`": (view(), view(mode="lease"), {}),
    "`release_statuses` or `retry_statuses`": (view(), view(release_statuses=[201]), {}),
    "`retention`": (view(), view(retention=1), {}),
    "`Body.store`, `Body.redact` or `Body.limit`": (view(), view(body=Body(store=False)), {}),
    "`required`, `Keys.pattern` or `Keys.min_length`": (view(), view(keys=Keys(min_length=200)), {}),
}
# Held elsewhere: who may see a replay, and where a record is looked up.
ELSEWHERE = {"permissions, or the user's rights", "`store`, `using` or `SHARDS`", "`HEADER`"}


def stated():
    return {change: outcome.strip("*`") for change, outcome, _why in rows(text("code_changes.md"))}


def test_the_page_tells_of_each_change():
    assert stated().keys() == CHANGES.keys() | ELSEWHERE


@pytest.mark.parametrize("change", CHANGES)
def test_a_retry_after_the_change_gets_what_the_page_says(rf, change):
    before, after, sent = CHANGES[change]
    key = f"order-{uuid4()}"
    first, second = send(rf, before, key=key), send(rf, after, key=key, **sent)
    assert outcome(first, second) == stated()[change].removesuffix(" again")


@pytest.mark.parametrize("change", ["the path", "`Fingerprint.headers`", "`scope`", "`mode`"])
def test_a_retry_without_a_code_change_is_replayed(rf, change):
    before = CHANGES[change][0]
    key = f"order-{uuid4()}"
    assert outcome(send(rf, before, key=key), send(rf, before, key=key)) == "replayed"


def outcome(first, second):
    if second.headers.get("Idempotent-Replayed") == "true":
        return "replayed" if second.content == first.content else "replayed, otherwise"
    return "runs" if second.status_code < 400 else str(second.status_code)


def test_another_header_is_another_matter(rf):
    create, key = view(), f"order-{uuid4()}"
    first = send(rf, create, key=key)
    with override_settings(IDEMPOTENCY={"HEADER": "X-Request-Id"}):
        assert outcome(first, send(rf, create, key=key)) == stated()["`HEADER`"].removesuffix(" again")
        assert send(rf, view(required=True), key=key).status_code == 400


@pytest.mark.parametrize("change", ["the view's code, or the shape of its response", "`mode`", "`retention`"])
def test_a_response_of_the_new_code_is_replayed_by_the_old_code(rf, change):
    old, new, _sent = CHANGES[change]
    key = f"order-{uuid4()}"
    assert outcome(send(rf, new, key=key), send(rf, old, key=key)) == "replayed"
