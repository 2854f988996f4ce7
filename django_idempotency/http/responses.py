"""HttpResponse ⇄ StoredResponse: which part of a response is stored, and how it is replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.http.problems import NO_STORE, NOT_STORED, problem_response
from django_idempotency.policy import Policy
from django_idempotency.reporting.logs import log
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


def stored(response: HttpResponseBase, policy: Policy, *, status: int | None = None) -> StoredResponse:
    """Return what is kept of a rendered response. A streaming or oversize body, or a file sent instead, is not kept.

    ``status``: the view's own, if rendering may have changed it.
    """
    headers = tuple((name, value) for name, value in response.items() if may_be_stored(name))
    if policy.store_cookies:
        headers += tuple(("Set-Cookie", morsel.OutputString()) for morsel in response.cookies.values())
    # With a header that can't be sent, a stored response would count as damaged.
    sendable = tuple(header for header in headers if are_headers([header]))
    kept = StoredResponse(response.status_code, sendable, _body(response, policy))
    return _without_page(kept, response, policy, status or kept.status)


def may_be_stored(header: str) -> bool:
    """Whether a header of this name is kept. Headers by which a view instructs its server are not."""
    name = header.lower()
    return not (name in _NEVER_STORED or name.startswith(("proxy-", "x-accel-", ":")))


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if response.streaming or not isinstance(response, HttpResponse):
        return None
    is_in_file = not FILE_HEADERS.isdisjoint(map(str.lower, response.headers))
    return None if is_in_file or len(response.content) > policy.body.limit else response.content


def is_browsable_page(response: Any) -> bool:
    """Whether ``response`` is a page of REST framework's browsable API, of which only the data is replayed."""
    return hasattr(getattr(response, "accepted_renderer", None), "get_default_renderer")


def _without_page(kept: StoredResponse, response: Any, policy: Policy, status: int) -> StoredResponse:
    """Return what is kept of a page of REST framework's browsable API, whose forms hold the caller's CSRF token.

    It is what a client of the API would have got: the page's data, rendered by the first of the view's other renderers.
    """
    if not is_browsable_page(response):
        return kept
    headers = tuple(header for header in kept.headers if header[0].lower() not in BODY_HEADERS)
    renderer = response.accepted_renderer.get_default_renderer(response.renderer_context["view"])
    if renderer is None:
        return StoredResponse(status, headers, None)
    body = _data(response, renderer)
    if body is None or len(body) > policy.body.limit:
        return StoredResponse(status, headers, None)
    charset = f"; charset={renderer.charset}" if renderer.charset else ""
    return StoredResponse(status, (("Content-Type", renderer.media_type + charset), *headers), body)


def _data(response: Any, renderer: Any) -> bytes | None:
    """Return a page's data as rendered by ``renderer``. If that raises, log why and return ``None``."""
    context = {**response.renderer_context, "indent": None}  # the page has set it
    try:
        body = renderer.render(response.data, renderer.media_type, context) or b""
        return body.encode(renderer.charset or "utf-8") if isinstance(body, str) else bytes(body)
    except Exception as error:  # the page itself is rendered: this may lose the copy, never the response
        message = "the data of a page could not be rendered, and is not stored: %s"
        log(logging.ERROR, "response_lost", message, type(error).__name__)
        return None


def replay(
    response: StoredResponse, make: Callable[..., HttpResponse] = HttpResponse, *, cacheable: bool = False
) -> HttpResponse:
    """Return the stored response, marked as a replay. One that was stored without its body says so.

    ``make``: the class of the response. ``cacheable``: the stored headers decide whether it may be cached.
    """
    headers = {name: value for name, value in response.headers if name != "Set-Cookie"}
    if not cacheable or response.body is None:
        headers = {name: value for name, value in headers.items() if not is_about_caching(name.lower())}
        headers["Cache-Control"] = NO_STORE
    headers[REPLAYED] = "true"
    replayed = _with_headers(response, headers, make)
    for name, value in response.headers:
        if name == "Set-Cookie":
            with suppress(CookieError):  # stored by an older Python, which allowed control characters
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
