"""HttpResponse ⇄ StoredResponse: which part of a response is stored, and how it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from http.cookies import SimpleCookie
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.http.problems import NO_STORE, NOT_STORED, problem_response
from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import StoredResponse, are_headers

REPLAYED = "Idempotent-Replayed"

# The headers of RFC 9110, section 7.6.1, those that the server sets anew, and the age in caches. The policy decides
# about cookies.
UNSTORED_HEADERS = frozenset(
    {
        "age",
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# These carry credentials, or what credentials are made of. So do all that start with "proxy-".
SENSITIVE_HEADERS = frozenset(
    {
        "authentication-control",
        "authentication-info",
        "authorization",
        "cookie",
        "cookie2",
        "set-cookie2",
        "www-authenticate",
    }
)
# These make the server send a file instead of the body: a replay would send what the file contains by then.
FILE_HEADERS = frozenset(
    {
        "x-accel-redirect",
        "x-lighttpd-send-file",
        "x-lighttpd-send-tempfile",
        "x-litespeed-location",
        "x-reproxy-file",
        "x-reproxy-url",
        "x-sendfile",
    }
)
# A response with one of these statuses has no body, whatever was stored.
WITHOUT_BODY = (204, 205, 304)
# These describe a body, and make no sense with another one.
BODY_HEADERS = frozenset(
    {"accept-ranges", "content-disposition", "content-encoding", "content-range", "content-type", "etag"}
)


_NEVER_STORED = UNSTORED_HEADERS | SENSITIVE_HEADERS | FILE_HEADERS


def stored(response: HttpResponseBase, policy: Policy) -> StoredResponse:
    """Return what is kept of a rendered response. A streaming or oversize body, or a file sent instead, is not kept.

    Neither is a page of REST framework's browsable API, whose forms hold the caller's CSRF token.
    """
    headers = tuple((name, value) for name, value in response.items() if may_be_stored(name))
    if policy.store_cookies:
        headers += tuple(("Set-Cookie", morsel.OutputString()) for morsel in response.cookies.values())
    # With a header that can't be sent, a stored response would count as damaged.
    sendable = tuple(header for header in headers if are_headers([header]))
    return StoredResponse(response.status_code, sendable, _body(response, policy))


def may_be_stored(header: str) -> bool:
    """Whether a header of this name is kept. Headers by which a view instructs its server are not."""
    name = header.lower()
    return not (name in _NEVER_STORED or name.startswith(("proxy-", "x-accel-", ":")))


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if response.streaming or not isinstance(response, HttpResponse) or is_browsable_page(response):
        return None
    is_in_file = not FILE_HEADERS.isdisjoint(map(str.lower, response.headers))
    return None if is_in_file or len(response.content) > policy.body.limit else response.content


def is_browsable_page(response: Any) -> bool:
    """Whether ``response`` is a page of REST framework's browsable API."""
    return hasattr(getattr(response, "accepted_renderer", None), "get_default_renderer")


def replay(response: StoredResponse, make: Callable[..., HttpResponse] = HttpResponse) -> HttpResponse:
    """Return the stored response, marked as a replay. One that was stored without its body says so.

    ``make``: the class of the response.
    """
    headers = {
        name: value for name, value in response.headers if name != "Set-Cookie" and not is_about_caching(name.lower())
    }
    headers |= {"Cache-Control": NO_STORE, REPLAYED: "true"}
    replayed = _with_headers(response, headers, make)
    for name, value in response.headers:
        if name == "Set-Cookie":
            replayed.cookies.update(SimpleCookie(value))
    return replayed


def _with_headers(response: StoredResponse, headers: dict[str, str], make: Callable[..., HttpResponse]) -> HttpResponse:
    if response.body is None and response.status not in WITHOUT_BODY:
        replayed = problem_response(NOT_STORED, status=response.status, make=make)
        for name, value in headers.items():
            if name.lower() not in BODY_HEADERS:
                replayed.headers[name] = value
        return replayed
    replayed = make(response.body or b"", status=response.status, headers=headers)
    if not any(name.lower() == "content-type" for name in headers):  # Django adds its own
        del replayed.headers["Content-Type"]
    return replayed


def is_about_caching(name: str) -> bool:
    """Whether a header says how long a response is fresh, including those of RFC 9213, which go first in caches."""
    return name in ("expires", "pragma", "surrogate-control") or name.endswith("cache-control")
