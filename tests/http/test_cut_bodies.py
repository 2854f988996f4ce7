"""A body shorter than its Content-Length is refused before the claim: the whole request can still come."""

from __future__ import annotations

from io import BytesIO

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpResponse
from django.test.client import encode_multipart

from django_idempotency.decorators import idempotent
from tests.support.callers import entry_point, is_replay, post, record
from tests.support.views import Runs, api_class, code

pytestmark = pytest.mark.django_db

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b"
BODIES = {
    "form": (b"amount=100000", FORM),
    "JSON": (b'{"amount": 100000}', "application/json"),
    "bytes": (b"100000", "application/octet-stream"),
    "multipart": (encode_multipart("b", {"amount": "100000"}), MULTIPART),
}


def cut(body, content_type, by):
    environ = post("k", body, content_type=content_type).environ
    return WSGIRequest(environ | {"wsgi.input": BytesIO(body[: len(body) - by])})


@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize(("body", "content_type"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("by", [1, 3])
def test_a_cut_body_is_refused_and_the_whole_request_runs(body, content_type, by, mode):
    runs = Runs()
    protected = idempotent(scope="public", mode=mode)(runs.view)
    refused = protected(cut(body, content_type, by))
    assert (refused.status_code, code(refused), runs.count, record()) == (400, "request_incomplete", 0, None)
    whole = protected(post("k", body, content_type=content_type))
    assert (whole.status_code, is_replay(whole), runs.count) == (200, False, 1)


@pytest.mark.drf
@pytest.mark.parametrize("name", BODIES)
def test_rest_framework_refuses_a_cut_body(name):
    from rest_framework.parsers import FileUploadParser, FormParser, JSONParser, MultiPartParser

    runs = Runs()
    parsers = (JSONParser, FormParser, MultiPartParser, FileUploadParser)
    protected = idempotent(scope="public")(api_class(runs.view, parser_classes=parsers)).as_view()
    assert code(protected(cut(*BODIES[name], 3)).render()) == "request_incomplete"
    assert (runs.count, record()) == (0, None)


def test_without_a_length_or_a_body_nothing_is_missed():
    for length in ("", "0"):
        request = post(f"k{length}", b"")
        request.META["CONTENT_LENGTH"] = length
        assert idempotent(scope="public")(lambda request: HttpResponse())(request).status_code == 200
    assert entry_point(lambda request: HttpResponse())("body").status_code == 200
