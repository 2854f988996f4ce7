"""HttpResponse ⇄ StoredResponse, and the problem answers of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.exceptions import (
    AnonymousKey,
    IdempotencyError,
    LateRetry,
    MalformedKey,
    MalformedSentTime,
    MissingKey,
    StoreUnavailable,
)
from django_idempotency.outcomes import Fail, Held, InFlight, Keep, Mismatch, Release, StoredResponse, Verdict
from django_idempotency.policy import Policy

PROBLEM_JSON = "application/problem+json"
REPLAYED = "Idempotent-Replayed"

# RFC 9110 section 7.6.1 and what the server sets anew; cookies go by policy.
UNSTORED_HEADERS = frozenset(
    {
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
# Statuses of which an answer has none, whatever was stored.
WITHOUT_BODY = (204, 205, 304)
# They describe a body, and make no sense beside another one.
BODY_HEADERS = frozenset(
    {"accept-ranges", "content-disposition", "content-encoding", "content-range", "content-type", "etag"}
)


# --- Storing and replaying -------------------------------------------------------------------------------------------


def stored(response: HttpResponseBase, policy: Policy) -> StoredResponse:
    """What is kept of a rendered response. A streaming or an oversize body is not read."""
    headers = tuple((name, value) for name, value in response.items() if _may_be_stored(name.lower()))
    if policy.store_cookies:
        headers += tuple(("Set-Cookie", morsel.OutputString()) for morsel in response.cookies.values())
    return StoredResponse(response.status_code, tuple(filter(_storable, headers)), _body(response, policy))


def _may_be_stored(name: str) -> bool:
    return not (name in UNSTORED_HEADERS or name in SENSITIVE_HEADERS or name.startswith(("proxy-", ":")))


def _storable(header: tuple[str, str]) -> bool:
    # JSON in PostgreSQL holds no NUL; no server sends one in a header either.
    return "\0" not in header[0] + header[1]


def _body(response: HttpResponseBase, policy: Policy) -> bytes | None:
    if response.streaming or not isinstance(response, HttpResponse) or len(response.content) > policy.max_body:
        return None
    return response.content


def replay(response: StoredResponse) -> HttpResponse:
    """The stored answer once more, marked as a replay; one that was stored without its body says so."""
    if response.body is None and response.status not in WITHOUT_BODY:
        answer = problem_response(NOT_STORED, status=response.status)
        headers = [header for header in response.headers if header[0].lower() not in BODY_HEADERS]
    else:
        answer = HttpResponse(response.body or b"", status=response.status)
        del answer.headers["Content-Type"]
        headers = list(response.headers)
    for name, value in headers:
        if name == "Set-Cookie":
            answer.cookies.update(SimpleCookie(value))
        else:
            answer.headers[name] = value
    answer.headers[REPLAYED] = "true"
    return answer


def judge(
    status: int,
    policy: Policy,
    response: Callable[[], StoredResponse],
    *,
    raised: bool = False,
    terminal: bool = False,
) -> Verdict:
    """What a status means for its record.

    ``raised``: it stands for an exception, which undoes the effects. ``terminal``: it is stored whatever the policy.
    """
    if status in policy.release_statuses and not terminal:
        return Release()
    if status in policy.retry_statuses and not terminal:
        return Fail(f"status {status}")
    return Keep(response(), failure=status >= 400, rollback=raised)


# --- Problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer of our own, in the terms of RFC 9457.

    ``retryable``: the same request with the same key may succeed later. ``safe_new_key``: nothing was done for this
    request, so sending it under a new key does nothing twice.
    """

    status: int
    code: str
    title: str
    retryable: bool
    safe_new_key: bool
    detail: str = ""
    retry_after: int | None = None

    @property
    def type(self) -> str:
        return conf().problem_base + self.code

    def members(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail or self.title,
            "code": self.code,
            "retryable": self.retryable,
            "safe_new_key": self.safe_new_key,
        }

    def headers(self) -> Iterator[tuple[str, str]]:
        yield "Link", f'<{self.type}>; rel="describedby"'
        if self.retry_after is not None:
            yield "Retry-After", str(self.retry_after)


Refusal = InFlight | Held | Mismatch | IdempotencyError

NOT_STORED = Problem(
    status=200,
    code="response_not_stored",
    title="The operation is done; its answer was not kept.",
    retryable=False,
    safe_new_key=False,
)

MARKED_FAILED = Problem(
    status=410,
    code="marked_failed",
    title="A person has decided that the operation failed; it will not be run.",
    retryable=False,
    safe_new_key=False,
)


def marked_failed(status: int, detail: str) -> StoredResponse:
    """The answer of a key that a person has marked as failed."""
    answer = problem_response(replace(MARKED_FAILED, detail=detail), status=status)
    return StoredResponse(status, tuple(answer.items()), answer.content)


def problem(refusal: Refusal) -> Problem:
    """The problem answer for an outcome or an error. An error that is nobody's answer is raised."""
    match refusal:
        case MissingKey():
            return Problem(400, "key_missing", str(refusal.__doc__), retryable=False, safe_new_key=True)
        case MalformedKey():
            title = "The Idempotency-Key header holds no usable key."
            return Problem(400, "key_malformed", title, retryable=False, safe_new_key=True, detail=str(refusal))
        case AnonymousKey():
            title = "Anonymous callers can't use an Idempotency-Key here."
            return Problem(400, "key_anonymous", title, retryable=False, safe_new_key=True)
        case MalformedSentTime():
            title = "The header that says when the request was first sent holds no time."
            return Problem(400, "sent_malformed", title, retryable=False, safe_new_key=True, detail=str(refusal))
        case LateRetry():
            return Problem(410, "late_retry", str(refusal.__doc__), retryable=False, safe_new_key=False)
        case InFlight(retry_after):
            title = "The operation is being executed; retry with the same key."
            return Problem(409, "in_flight", title, retryable=True, safe_new_key=False, retry_after=retry_after)
        case Held(reason):
            title = "Whether the operation took place has to be decided by a person."
            return Problem(409, "held", title, retryable=False, safe_new_key=False, detail=reason)
        case Mismatch():
            title = "The key was first used with another request."
            return Problem(422, "fingerprint_mismatch", title, retryable=False, safe_new_key=True)
        case StoreUnavailable(ran=ran):
            title = "The idempotency store can't be reached; retry with the same key."
            return Problem(503, "store_unavailable", title, retryable=True, safe_new_key=not ran, retry_after=1)
    raise refusal


def problem_response(problem: Problem, *, status: int | None = None) -> HttpResponse:
    members = problem.members() | ({"status": status} if status else {})
    response = HttpResponse(json.dumps(members), content_type=PROBLEM_JSON, status=status or problem.status)
    for name, value in problem.headers():
        response.headers[name] = value
    return response
