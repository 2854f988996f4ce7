"""HttpResponse ⇄ StoredResponse: which part of a response is stored, and how it is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.cookies import CookieError, Morsel, SimpleCookie
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.values.outcomes import StoredResponse, dotted_name, is_header
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
    """Return what is kept of a rendered response. A streaming or oversize body, or a
    file sent instead, is not kept.

    Neither is a page of REST framework's browsable API, whose forms hold the caller's
    CSRF token.
    """
    sent = list(response.items())
    headers = [header for header in sent if may_be_stored(header[0])]
    if policy.store_cookies:
        headers += [
            ("Set-Cookie", morsel.OutputString())
            for morsel in response.cookies.values()
        ]
    # With a header that can't be sent, a stored response would count as damaged.
    sendable = tuple([header for header in headers if is_header(*header)])
    in_file = not FILE_HEADERS.isdisjoint([name.lower() for name, _value in sent])
    body = None if in_file else _body(response, policy)
    return StoredResponse(response.status_code, sendable, body)


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if (
        response.streaming
        or not isinstance(response, HttpResponse)
        or is_browsable_page(response)
    ):
        return None
    content = response.content
    return None if len(content) > policy.body.limit else content


def is_browsable_page(response: Any) -> bool:
    """Whether ``response`` is a page of REST framework's browsable API."""
    return hasattr(getattr(response, "accepted_renderer", None), "get_default_renderer")


def replay(
    response: StoredResponse, make: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    """Return the stored response, marked as a replay. One that was stored without its
    body says so.

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
            _set_cookie(replayed, value)
    return replayed


def _set_cookie(response: HttpResponse, text: str) -> None:
    """Set a cookie as it is stored. ``SimpleCookie.load`` would drop all attributes
    that follow a path with a space or a letter beyond ASCII.
    """
    cookie, *attributes = text.split(";")
    name, _, coded = cookie.partition("=")
    morsel: Morsel[str] = Morsel()
    with suppress(CookieError):  # damaged by hand
        morsel.set(name, SimpleCookie().value_decode(coded)[0], coded)
        for attribute in attributes:
            key, is_pair, value = attribute.strip().partition("=")
            if morsel.isReservedKey(key):
                morsel[key] = value if is_pair else True
        response.cookies[name] = morsel


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
    # Django adds its own
    if "content-type" not in map(str.lower, headers):
        del replayed.headers["Content-Type"]
    return replayed


def problem_response(
    problem: Problem, make: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    response = problem.response(conf().problem_type_base_url)
    return make(response.body, status=response.status, headers=dict(response.headers))


def refusal(problem: Problem, request: HttpRequest, policy: Policy) -> HttpResponseBase:
    """Return the response that refuses ``request``, made by the policy's ``problems``
    if it has one.

    Raises ``ImproperlyConfigured`` if that returns no response.
    """
    if policy.problems is None:
        return as_refusal(problem_response(problem), problem)
    response = policy.problems(problem, request)
    if isinstance(response, HttpResponseBase):
        return as_refusal(response, problem)
    raise ImproperlyConfigured(
        f"The problems callable {dotted_name(policy.problems)} returned"
        f" {type(response).__qualname__}. Return an HttpResponse."
    )


def as_refusal(response: Any, problem: Problem) -> HttpResponseBase:
    """Give ``response`` the headers of ``problem`` that it does not set, and mark it
    for an outer entry point: it is no view's response and must not be stored as one.
    """
    for name, value in problem.headers(conf().problem_type_base_url):
        response.headers.setdefault(name, value)
    response._idempotency_refusal = True
    return response  # type: ignore[no-any-return]


def seal_of(response: Any) -> object:
    """Return what is equal as long as nobody changes ``response``."""
    headers, cookies = dict(response.headers._store), response.cookies.output()
    names = tuple(vars(response))
    return names, response.status_code, headers, cookies, response.content


def restore(response: HttpResponse, fresh: HttpResponse) -> None:
    """Make ``response`` what it was, as ``fresh`` is. Attributes for middleware, such
    as those of ``xframe_options_exempt``, stay.
    """
    vars(response).pop("data", None)  # of REST framework, made of the content
    vars(response).update(vars(fresh))


def is_refusal(response: object) -> bool:
    return hasattr(response, "_idempotency_refusal")
