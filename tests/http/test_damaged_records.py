"""A record that was damaged by hand replays as a response that was not stored."""

from __future__ import annotations

import json

import pytest
from django.http import HttpResponse

from django_idempotency.decorators import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay
from tests.support.views import Runs, code

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
def test_headers_that_are_none_replay_as_not_stored(call, headers):
    runs = Runs(lambda request: HttpResponse("x", status=201))
    view = idempotent(store_cookies=True)(runs.view)
    call(view)
    damage(headers)
    replayed = call(view)
    assert (replayed.status_code, code(replayed), is_replay(replayed)) == (201, "response_not_stored", True)
    assert runs.count == 1
