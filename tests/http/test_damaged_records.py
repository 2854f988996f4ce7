"""A record that was damaged by hand replays as a response that was not stored; a custom reason phrase comes back."""

from __future__ import annotations

import json

import pytest
from django.contrib import admin
from django.http import HttpResponse
from django.urls import path, reverse

from django_idempotency.decorators import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay
from tests.support.views import Runs, api_class, code

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
    [[":reason", 7]],
    [[":reason", "a\r\nX: y"]],
    [[":encrypted", 7]],
    [[":encrypted"]],
]


def damage(headers):
    assert IdempotencyRecord.objects.update(response_headers=headers) == 1


@pytest.mark.parametrize("headers", DAMAGED, ids=json.dumps)
def test_headers_that_are_none_replay_as_not_stored(call, headers):
    runs = Runs(lambda request: HttpResponse("x", status=201))
    view = idempotent(store_cookies=True)(runs.view)
    call(view)
    damage(headers)
    replayed = call(view)
    assert (replayed.status_code, code(replayed), is_replay(replayed)) == (201, "response_not_stored", True)
    assert runs.count == 1


@pytest.mark.drf
@pytest.mark.parametrize("headers", DAMAGED[:3], ids=json.dumps)
def test_rest_framework_replays_a_damaged_record_as_not_stored(call, headers):
    from rest_framework.response import Response

    runs = Runs(lambda request: Response({}, status=201))
    view = idempotent(scope="public")(api_class(runs.view)).as_view()
    call(view)
    damage(headers)
    replayed = call(view)
    assert (replayed.status_code, code(replayed), runs.count) == (201, "response_not_stored", 1)


def test_the_admin_shows_a_damaged_record(call, admin_client, settings):
    call(idempotent(scope="public")(lambda request: HttpResponse("x", status=201)))
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    page = reverse("admin:django_idempotency_idempotencyrecord_change", args=[IdempotencyRecord.objects.get().pk])
    for headers in DAMAGED:
        damage(headers)
        assert admin_client.get(page).status_code == 200, headers
