"""HttpResponse ⇄ StoredResponse: which part of a response is stored, and how it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from http.cookies import SimpleCookie
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.values.outcomes import StoredResponse, is_header
from django_idempotency.values.policy import Policy
from django_idempotency.values.problems import NO_STORE, NOT_STORED, Problem
from django_idempotency.values.response_headers import (
    BODY_HEADERS,
    FILE_HEADERS,
    WITHOUT_BODY,
    is_about_caching,
    may_be_stored,
)

REPLAYED = "Idempotent-Replayed"


def stored(response: HttpResponseBase, policy: Policy) -> StoredResponse:
    """Return what is kept of a rendered response. A streaming or oversize body, or a file sent instead, is not kept.

    Neither is a page of REST framework's browsable API, whose forms hold the caller's CSRF token.
    """
    headers = tuple(
        (name, value) for name, value in response.items() if may_be_stored(name)
    )
    if policy.store_cookies:
        headers += tuple(
            ("Set-Cookie", morsel.OutputString())
            for morsel in response.cookies.values()
        )
    # With a header that can't be sent, a stored response would count as damaged.
    sendable = tuple(header for header in headers if is_header(*header))
    return StoredResponse(response.status_code, sendable, _body(response, policy))


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if (
        response.streaming
        or not isinstance(response, HttpResponse)
        or is_browsable_page(response)
    ):
        return None
    is_in_file = not FILE_HEADERS.isdisjoint(map(str.lower, response.headers))
    return (
        None
        if is_in_file or len(response.content) > policy.body.limit
        else response.content
    )


def is_browsable_page(response: Any) -> bool:
    """Whether ``response`` is a page of REST framework's browsable API."""
    return hasattr(getattr(response, "accepted_renderer", None), "get_default_renderer")


def replay(
    response: StoredResponse, make: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    """Return the stored response, marked as a replay. One that was stored without its body says so.

    ``make``: the class of the response.
    """
    headers = {
        name: value
        for name, value in response.headers
        if name != "Set-Cookie" and not is_about_caching(name.lower())
    }
    headers |= {"Cache-Control": NO_STORE, REPLAYED: "true"}
    replayed = _with_headers(response, headers, make)
    for name, value in response.headers:
        if name == "Set-Cookie":
            replayed.cookies.update(SimpleCookie(value))
    return replayed


def _with_headers(
    response: StoredResponse, headers: dict[str, str], make: Callable[..., HttpResponse]
) -> HttpResponse:
    if response.body is None and response.status not in WITHOUT_BODY:
        replayed = problem_response(replace(NOT_STORED, status=response.status), make)
        for name, value in headers.items():
            if name.lower() not in BODY_HEADERS:
                replayed.headers[name] = value
        return replayed
    replayed = make(response.body or b"", status=response.status, headers=headers)
    if not any(
        name.lower() == "content-type" for name in headers
    ):  # Django adds its own
        del replayed.headers["Content-Type"]
    return replayed


def problem_response(
    problem: Problem, make: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    response = problem.response(conf().problem_type_base_url)
    return make(response.body, status=response.status, headers=dict(response.headers))


def mark_refusal(response: HttpResponseBase) -> None:
    """Mark ``response`` for an outer entry point: it is not a view's response and must not be stored as one."""
    response._idempotency_refusal = True  # type: ignore[attr-defined]


def is_refusal(response: object) -> bool:
    return hasattr(response, "_idempotency_refusal")
