"""Whatever a client sends, it gets a clear 4xx, or an answer if that was legitimate;
and no record comes to harm.
"""

from __future__ import annotations

import json
from http.client import HTTPResponse
from io import BytesIO

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpResponse
from django.test.client import encode_multipart
from django.urls import path

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay, payment, post, record
from tests.support.views import Runs, api_class, code

MULTIPART = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'

BAD_KEYS = {
    "empty": "",
    "empty string": '""',
    "256 characters": "x" * 256,
    "256 quoted": '"' + "x" * 256 + '"',
    "NUL": '"a\0b"',
    "non-ASCII": "clé",
    "non-ASCII quoted": '"clé"',
    "a list": '"a", "b"',
    "unbalanced": '"open',
}
# Bodies, and whether the plain view below, which reads none of it, has reason to answer
# 400.
BODIES = {
    "not JSON": ({"data": b"{nonsense", "content_type": "application/json"}, 200),
    "empty JSON": ({"data": b"", "content_type": "application/json"}, 200),
    "a NUL inside": ({"data": b'{"a": "\0"}', "content_type": "application/json"}, 200),
    "an escaped NUL": (
        {"data": rb'{"a": "\u0000"}', "content_type": "application/json"},
        200,
    ),
    "invalid UTF-8": (
        {"data": b'{"a": "\xff\xfe"}', "content_type": "application/json"},
        200,
    ),
    "lone surrogates": (
        {"data": rb'{"\ud800": "\udfff"}', "content_type": "application/json"},
        200,
    ),
    "deep nesting": ({"data": b"[" * 100_000, "content_type": "application/json"}, 200),
    "NaN": ({"data": b"[NaN, Infinity]", "content_type": "application/json"}, 200),
    "a long number": (
        {"data": b"9" * 100_000, "content_type": "application/json"},
        200,
    ),
    "10 MB": (
        {"data": b'"' + b"x" * 10_000_000 + b'"', "content_type": "application/json"},
        400,
    ),
    "a bad form": (
        {
            "data": b"%zz=%&&=;\xff=\0",
            "content_type": "application/x-www-form-urlencoded",
        },
        200,
    ),
    "truncated multipart": (
        {"data": PART + b"--b\r\nContent-Disp", "content_type": MULTIPART},
        200,
    ),
    "multipart that is none": (
        {"data": b"\xff\0nonsense", "content_type": MULTIPART},
        200,
    ),
    "multipart without a boundary": (
        {"data": PART, "content_type": "multipart/form-data"},
        400,
    ),
    "multipart of bad base64": (
        {
            "data": PART.replace(
                b"\r\n\r\n1", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n~"
            ),
            "content_type": MULTIPART,
        },
        200,
    ),
    "2,000 multipart fields": (
        {"data": PART * 2000 + b"--b--", "content_type": MULTIPART},
        400,
    ),
    "no such type": ({"data": b"x", "content_type": "\xff; =;charset=none"}, 200),
}


def plain(runs):
    return idempotent(runs.view)


def rest_framework(runs):
    from rest_framework.authentication import SessionAuthentication
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    class View(IdempotentMixin, APIView):
        authentication_classes = [SessionAuthentication]

        def post(self, request, *args, **kwargs):
            return Response(
                {
                    "run": runs.view(request).content.decode(),
                    "read": str(request.data)[:5],
                }
            )

    return View.as_view()


@pytest.fixture(params=[plain, pytest.param(rest_framework, marks=pytest.mark.drf)])
def entry_point(request):
    """From what counts the runs to a view behind one of the entry points."""
    return request.param


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
@pytest.mark.parametrize("send", ["__call__", "asgi"])
def test_a_bad_key_is_refused_and_nothing_runs(
    call, client_sees_500, entry_point, key, send
):
    runs = Runs()
    response = getattr(call, send)(entry_point(runs), key=key)
    assert (response.status_code, code(response)) == (400, "idempotency_key_malformed")
    assert json.loads(response.content)["detail"]
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)


@pytest.mark.parametrize(
    "key", ["x" * 255, "!#$%&'()*+-./:<=>?@[]^_`{|}~", '"with";a=1', '  "padded"  ']
)
def test_an_odd_but_good_key_works(call, entry_point, key):
    view = entry_point(Runs())
    assert [is_replay(call(view, key=key)) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_gets_the_same_status_on_a_retry(call, client_sees_500, name):
    sent, status = BODIES[name]
    runs = Runs()
    answers = [call(plain(runs), **sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert (runs.count, is_replay(answers[1])) == (
        (1, True) if status == 200 else (0, False)
    )


@pytest.mark.drf
@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_gets_the_status_of_the_views_own_parser(
    call, client_sees_500, name
):
    sent, _status = BODIES[name]
    view = rest_framework(Runs())
    unkeyed = call(view, key=None, **sent)
    keyed = call(view, **sent)
    assert keyed.status_code == unkeyed.status_code or (keyed.status_code, name) == (
        400,
        "no such type",
    )
    # which REST framework's JSON parser is not up to
    assert keyed.status_code < 500 or name == "deep nesting"


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_under_a_used_key_leaves_its_record_alone(
    call, client_sees_500, entry_point, name
):
    runs = Runs()
    view = entry_point(runs)
    assert call(view, {"a": 1}).status_code == 200
    before = IdempotencyRecord.objects.values().get()
    refused = call(view, **BODIES[name][0])
    assert refused.status_code in (400, 422)
    assert not is_replay(refused)
    assert IdempotencyRecord.objects.values().get() == before
    assert is_replay(call(view, {"a": 1}))
    assert runs.count == 1


def test_a_large_upload_is_legitimate(call, entry_point):
    upload = (
        PART.replace(b'"a"', b'"a"; filename="f"').replace(b"1", b"x" * 10_000_000)
        + b"--b--\r\n"
    )
    view = entry_point(Runs())
    answers = [
        call(view, data=body, content_type=MULTIPART)
        for body in (upload, upload, upload.replace(b"x", b"y", 1))
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 422]


@pytest.mark.parametrize(
    "target",
    [
        "/view/" + "x" * 5000,
        "/view/a?" + "&".join(f"p{n}={n}" for n in range(5000)),
        "/view/%00%ff?%00=%ff&&=",
        "/view/é?é",
    ],
    ids=[
        "path of 5,000 characters",
        "query of 5,000 parameters",
        "NUL and invalid UTF-8",
        "not escaped",
    ],
)
def test_an_odd_url_is_as_legitimate_as_without_a_key(
    call, settings, client_sees_500, entry_point, target
):
    settings.ROOT_URLCONF = (path("view/<path:rest>", entry_point(Runs())),)
    unkeyed, *answers = (
        call.client.generic(**call.request({"a": 1}, path=target, key=key))
        for key in (None, "k", "k")
    )
    assert [answer.status_code for answer in answers] == [unkeyed.status_code] * 2
    # REST framework reads the query, and Django refuses to parse so many parameters.
    refused = entry_point is rest_framework and target.count("&") > 1000
    assert (unkeyed.status_code, is_replay(answers[1])) == (
        (400, False) if refused else (200, True)
    )


ENDPOINTS = ["/api/charges/", "/orders/"]
LINES = {
    "empty": [b"Idempotency-Key:"],
    "NUL": [b"Idempotency-Key: a\0b"],
    "UTF-8": ["Idempotency-Key: clé".encode()],
    "two lines": [b'Idempotency-Key: "one"', b'Idempotency-Key: "two"'],
}


def on_the_wire(server, target, lines, body):
    """The status of a POST that no client library has set right."""
    with server.sent(target, body, *lines) as connection:
        response = HTTPResponse(connection, method="POST")
        response.begin()
        response.read()
    return response.status


@pytest.mark.server
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", LINES)
def test_a_bad_header_on_the_wire_is_a_400_without_effect(server, endpoint, name):
    reference = f"{endpoint} {name}"
    assert (
        on_the_wire(
            server, endpoint, LINES[name], json.dumps(payment(reference)).encode()
        )
        == 400
    )
    assert server.ledger(reference) == 0


def test_fields_beyond_djangos_limit_count_by_their_bytes(call, settings):
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 2

    def view(request):
        return HttpResponse(request.body)

    def send(body, key):
        return call(
            idempotent(view),
            key=key,
            data=body,
            content_type="application/x-www-form-urlencoded",
        )

    assert [send(body, "two").content for body in (b"a=1&b=2", b"b=2&a=1")] == [
        b"a=1&b=2"
    ] * 2
    assert send(b"a=1&b=2&c=3", "three").status_code == 200, (
        "no more is refused than without a key"
    )
    assert code(send(b"b=2&a=1&c=3", "three")) == "idempotency_key_reused"


FORM = "application/x-www-form-urlencoded"
WHOLE = {
    "form": (b"amount=100000", FORM),
    "JSON": (b'{"amount": 100000}', "application/json"),
    "bytes": (b"100000", "application/octet-stream"),
    "multipart": (encode_multipart("b", {"amount": "100000"}), MULTIPART),
}


def cut(body, content_type, by):
    environ = post("k", body, content_type=content_type).environ
    return WSGIRequest(environ | {"wsgi.input": BytesIO(body[: len(body) - by])})


@pytest.mark.django_db
@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize(("body", "content_type"), WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("by", [1, 3])
def test_a_cut_body_is_refused_and_the_whole_request_runs(body, content_type, by, mode):
    runs = Runs()
    protected = idempotent(scope="public", mode=mode)(runs.view)
    refused = protected(cut(body, content_type, by))
    assert (refused.status_code, code(refused), runs.count, record()) == (
        400,
        "request_incomplete",
        0,
        None,
    )
    whole = protected(post("k", body, content_type=content_type))
    assert (whole.status_code, is_replay(whole), runs.count) == (200, False, 1)


@pytest.mark.django_db
@pytest.mark.drf
@pytest.mark.parametrize("name", WHOLE)
def test_rest_framework_refuses_a_cut_body(name):
    from rest_framework.parsers import (
        FileUploadParser,
        FormParser,
        JSONParser,
        MultiPartParser,
    )

    runs = Runs()
    parsers = (JSONParser, FormParser, MultiPartParser, FileUploadParser)
    protected = idempotent(scope="public")(
        api_class(runs.view, parser_classes=parsers)
    ).as_view()
    assert code(protected(cut(*WHOLE[name], 3)).render()) == "request_incomplete"
    assert (runs.count, record()) == (0, None)


@pytest.mark.django_db
def test_without_a_length_or_a_body_nothing_is_missed():
    for length in ("", "0"):
        request = post(f"k{length}", b"")
        request.META["CONTENT_LENGTH"] = length
        assert (
            idempotent(scope="public")(lambda request: HttpResponse())(
                request
            ).status_code
            == 200
        )
    assert (
        idempotent(scope="public")(lambda request: HttpResponse())(
            post("body")
        ).status_code
        == 200
    )
