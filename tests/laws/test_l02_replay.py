"""L2: a replay is what the first caller got."""

from __future__ import annotations

import pytest
from django.http import HttpResponse, HttpResponsePermanentRedirect
from django.template import engines
from django.template.response import SimpleTemplateResponse

from tests.support.callers import OF_A_REPLAY, entry_point, is_replay
from tests.support.views_of_laws import in_each_mode

pytestmark = pytest.mark.usefixtures("payer")


def bare_204():
    response = HttpResponse(status=204)
    del response.headers["Content-Type"]
    return response


HEADERS = {
    "ETag": '"v1"',
    "Vary": "Accept, X-Tenant",
    "Cache-Control": "no-store",
    "X-Odd": "ü",
    "Location": "/7/",
}
RESPONSES = {
    "json": lambda: HttpResponse(
        b'{"a":  1}', "application/json; charset=utf-8", status=201
    ),
    "binary": lambda: HttpResponse(bytes(range(256)), "application/octet-stream"),
    "no content": lambda: HttpResponse(status=204),
    "no content type": bare_204,
    "no body": lambda: HttpResponse(),
    "latin-1": lambda: HttpResponse("é", content_type="text/plain; charset=latin-1"),
    "iterator": lambda: HttpResponse(iter(["a", b"\0", "c"])),
    "template": lambda: SimpleTemplateResponse(
        engines["django"].from_string("<p>{{ name }}</p>"), {"name": "é"}
    ),
    "redirect": lambda: HttpResponsePermanentRedirect("https://example.com/é"),
    "headers": lambda: HttpResponse(headers=HEADERS, status=201),
    "terminal failure": lambda: HttpResponse(b"card declined", status=402),
    "conflict": lambda: HttpResponse("sold out", status=409),
}


@in_each_mode
@pytest.mark.parametrize("answer", RESPONSES.values(), ids=RESPONSES)
def test_l2_a_replay_is_the_first_response(mode, answer):
    send = entry_point(lambda request: answer(), mode=mode)
    first, second = send(), send()
    assert not is_replay(first)
    assert is_replay(second)
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert dict(second.items()) == dict(first.items()) | OF_A_REPLAY


@pytest.mark.parametrize("path", ["/", "/a b", "/ä", '/"a b"', "/a\\b", "/a,b=c"])
@pytest.mark.parametrize("store_cookies", [False, True])
def test_l2_cookies_are_replayed_if_the_policy_says_so(store_cookies, path):
    def view(request):
        response = HttpResponse()
        rest = {"httponly": True, "samesite": "Lax", "secure": True, "max_age": 60}
        response.set_cookie("basket", '17; "x"', path=path, **rest)
        return response

    send = entry_point(view, store_cookies=store_cookies)
    first, second = send(), send()
    assert is_replay(second)
    assert second.cookies.output() == (first.cookies.output() if store_cookies else "")
