"""HttpResponse ⇄ StoredResponse: what of a response is stored, and how it is replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http.cookies import SimpleCookie
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.http.problems import NO_STORE, NOT_STORED, problem_response
from django_idempotency.logs import log
from django_idempotency.outcomes import REASON, StoredResponse, are_headers
from django_idempotency.policy import Policy

REPLAYED = "Idempotent-Replayed"

# RFC 9110 section 7.6.1, what the server sets anew, and the time in caches; cookies go by policy.
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
# They carry credentials, or what credentials are made of. So does all that starts with "proxy-".
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
# They have the server send a file in place of the body: a replay would send what is in it by then.
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
# Statuses of which a response has none, whatever was stored.
WITHOUT_BODY = (204, 205, 304)
# They describe a body, and make no sense beside another one.
BODY_HEADERS = frozenset(
    {"accept-ranges", "content-disposition", "content-encoding", "content-range", "content-type", "etag"}
)


def stored(response: HttpResponseBase, policy: Policy, *, status: int | None = None) -> StoredResponse:
    """What is kept of a rendered response. A streaming or an oversize body is not read, and no file in its place.

    ``status``: the view's, where rendering may have changed it.
    """
    headers = tuple((name, value) for name, value in response.items() if may_be_stored(name))
    if policy.store_cookies:
        headers += tuple(("Set-Cookie", morsel.OutputString()) for morsel in response.cookies.values())
    if response._reason_phrase is not None:  # type: ignore[attr-defined]
        headers += ((REASON, response.reason_phrase),)
    kept = StoredResponse(response.status_code, tuple(filter(_can_be_sent, headers)), _body(response, policy))
    return _without_page(kept, response, policy, status or kept.status)


def may_be_stored(header: str) -> bool:
    """Whether a header of this name is kept. Those by which a view instructs its server are not."""
    name = header.lower()
    unstored = UNSTORED_HEADERS | SENSITIVE_HEADERS | FILE_HEADERS
    return not (name in unstored or name.startswith(("proxy-", "x-accel-", ":")))


def _can_be_sent(header: tuple[str, str]) -> bool:
    """Whether a server can send it: with one that it can't, a stored response would count as damaged."""
    return are_headers([header])


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if response.streaming or not isinstance(response, HttpResponse) or any(map(response.has_header, FILE_HEADERS)):
        return None
    return response.content if len(response.content) <= policy.max_body_size else None


def is_browsable_page(response: Any) -> bool:
    """Whether it is a page of REST framework's browsable API, of which a replay is the data alone."""
    return hasattr(getattr(response, "accepted_renderer", None), "get_default_renderer")


def _without_page(kept: StoredResponse, response: Any, policy: Policy, status: int) -> StoredResponse:
    """What is kept in place of a page of REST framework's browsable API, whose forms hold the caller's CSRF token.

    It is what a client of the API would have got: the page's data, by the first of the view's other renderers.
    """
    if not is_browsable_page(response):
        return kept
    headers = tuple(header for header in kept.headers if header[0].lower() not in BODY_HEADERS)
    renderer = response.accepted_renderer.get_default_renderer(response.renderer_context["view"])
    if renderer is None:
        return StoredResponse(status, headers, None)
    body = _data(response, renderer)
    if body is None or len(body) > policy.max_body_size:
        return StoredResponse(status, headers, None)
    charset = f"; charset={renderer.charset}" if renderer.charset else ""
    return StoredResponse(status, (("Content-Type", renderer.media_type + charset), *headers), body)


def _data(response: Any, renderer: Any) -> bytes | None:
    """Return what ``renderer`` makes of a page's data; ``None``, and the log says why, if it raises."""
    context = {**response.renderer_context, "indent": None}  # which the page has set
    try:
        body = renderer.render(response.data, renderer.media_type, context) or b""
        return body.encode(renderer.charset or "utf-8") if isinstance(body, str) else bytes(body)
    except Exception as error:  # the page itself is rendered: it may cost the copy, never the response
        message = "the data of a page could not be rendered, and is not stored: %s"
        log(logging.ERROR, "response_lost", message, type(error).__name__)
        return None


def replay(
    response: StoredResponse, make: Callable[..., HttpResponse] = HttpResponse, *, cacheable: bool = False
) -> HttpResponse:
    """The stored response once more, marked as a replay; one that was stored without its body says so.

    ``make``: the class of the response. ``cacheable``: what was stored says whether it may be cached.
    """
    if response.body is None and response.status not in WITHOUT_BODY:
        replayed = problem_response(NOT_STORED, status=response.status, make=make)
        headers = [header for header in response.headers if header[0].lower() not in BODY_HEADERS]
    else:
        replayed = make(response.body or b"", status=response.status)
        del replayed.headers["Content-Type"]
        headers = list(response.headers)
    for name, value in headers:
        if name == "Set-Cookie":
            replayed.cookies.update(SimpleCookie(value))
        elif name == REASON:
            replayed.reason_phrase = value
        else:
            replayed.headers[name] = value
    if not cacheable or response.body is None:
        _forbid_caching(replayed)
    replayed.headers[REPLAYED] = "true"
    return replayed


def _forbid_caching(response: HttpResponse) -> None:
    for name in [name for name in response.headers if is_about_caching(name.lower())]:
        del response.headers[name]
    response.headers["Cache-Control"] = NO_STORE


def is_about_caching(name: str) -> bool:
    """Whether it says how long a response is fresh; with those of RFC 9213, which caches heed first."""
    return name in ("expires", "pragma", "surrogate-control") or name.endswith("cache-control")
