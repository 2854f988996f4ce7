"""The package's own responses to requests, as problem documents (RFC 9457)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils import translation
from django.utils.functional import Promise
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_idempotency.conf import conf, language
from django_idempotency.exceptions import (
    AnonymousKey,
    IdempotencyError,
    MalformedKey,
    MissingKey,
    NotAdmitted,
    ReplayForbidden,
    RequestIncomplete,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import InFlight, Mismatch, OnHold, StoredResponse

PROBLEM_JSON = "application/problem+json"
NO_STORE = "no-store"
NO_TYPE = "about:blank"  # RFC 9457 section 4.2.1


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the package's own responses, in the terms of RFC 9457.

    ``retryable``: the same request with the same key may succeed later. ``safe_new_key``: it is certain that nothing
    was ever done under this key, so sending the request under a new key does nothing twice.
    """

    status: int
    code: str
    title: str | Promise
    detail: str | Promise
    retryable: bool = False
    safe_new_key: bool = False
    retry_after: int | None = None

    @property
    def type(self) -> str:
        base = conf().problem_type_base_url
        return NO_TYPE if base is None else base + self.code

    def members(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "title": str(self.title),
            "status": self.status,
            "detail": str(self.detail or self.title),
            "code": self.code,
            "retryable": self.retryable,
            "safe_new_key": self.safe_new_key,
        }

    def headers(self) -> Iterator[tuple[str, str]]:
        yield "Cache-Control", NO_STORE
        if self.type != NO_TYPE:
            yield "Link", f'<{self.type}>; rel="describedby"'
        if self.retry_after is not None:
            yield "Retry-After", str(self.retry_after)
        if self.retry_after is not None or not self.retryable:  # else the caller has to do something first
            yield "X-Should-Retry", "true" if self.retryable else "false"


Refusal = InFlight | OnHold | Mismatch | IdempotencyError

NOT_STORED = Problem(
    status=200,
    code="response_not_stored",
    title=_("The operation was completed, but its response was not stored."),
    detail=_("A retry will not run it again. Fetch the result in another way."),
)

MARKED_FAILED = Problem(
    status=410,
    code="marked_failed",
    title=_("An operator has decided that the operation failed; it will not be run."),
    detail=_("Ask the operator whether a new key is safe."),
)


def marked_failed(status: int, detail: str) -> StoredResponse:
    """Return the response for a key that an operator has marked as failed.

    It is in the project's language, because it is for the client.
    """
    with translation.override(language()):
        response = problem_response(replace(MARKED_FAILED, detail=detail or MARKED_FAILED.detail), status=status)
    return StoredResponse(status, tuple(response.items()), response.content)


def problem(refusal: Refusal) -> Problem:
    """Return the problem document for an outcome or an error. Raises an error that stands for no response.

    ``safe_new_key`` is true only if no record can exist. After an outage, an expired session or a rebuilt body, the
    operation may have been executed under the key.
    """
    match refusal:
        case MissingKey():
            return Problem(
                status=400,
                code="idempotency_key_missing",
                title=_("This operation needs an idempotency key, but the request has none."),
                detail=_("Generate a key for the operation, and send the same key with every retry of it."),
                safe_new_key=True,
            )
        case MalformedKey(never_used=never_used):
            return Problem(
                status=400,
                code="idempotency_key_malformed",
                title=_("The request has no usable idempotency key."),
                detail=_translated(refusal),
                safe_new_key=never_used,
            )
        case AnonymousKey():
            return Problem(
                status=400,
                code="idempotency_key_anonymous",
                title=_("The server can't tell whose idempotency key this is."),
                detail=_(
                    "If the request was not authenticated, authenticate and send it again with the same key: it may "
                    "have been executed. If it was, the server has to define a scope for such callers."
                ),
                retryable=True,
            )
        case RequestIncomplete():
            return Problem(
                status=400,
                code="request_incomplete",
                title=_("The body of the request is shorter than its Content-Length."),
                detail=_("Nothing was run. Send the whole request again with the same key."),
                retryable=True,
            )
        case ReplayForbidden():
            return Problem(
                status=403,
                code="replay_forbidden",
                title=_("You may not see the response of this operation."),
                detail=_(
                    "It was executed, and will not be executed again. Callers who may see the response still get it."
                ),
            )
        case NotAdmitted(retry_after=retry_after):
            return Problem(
                status=429,
                code="idempotency_key_not_admitted",
                title=_("A new operation can't be accepted now."),
                detail=_("Nothing was run. Wait, and send the same request with the same key again."),
                retryable=True,
                retry_after=jittered(retry_after),
            )
        case InFlight(retry_after):
            return Problem(
                status=409,
                code="idempotency_key_in_use",
                title=_("A request with this idempotency key is being executed."),
                detail=_("Wait, and send the same request with the same key again."),
                retryable=True,
                retry_after=jittered(retry_after),
            )
        case OnHold():
            return Problem(
                status=409,
                code="idempotency_key_on_hold",
                title=_("An operator has to decide whether the operation took place."),
                detail=_("It may have been executed. Ask the operator before you send it under any key."),
            )
        case Mismatch():
            return Problem(
                status=422,
                code="idempotency_key_reused",
                title=_("The idempotency key was first used with another request."),
                detail=_(
                    "Its method, path, query or body differs. Send a retry exactly as it was first sent; use a new "
                    "key only for another operation."
                ),
            )
        case StoreUnavailable():
            return Problem(
                status=503,
                code="idempotency_store_unavailable",
                title=_("The idempotency store can't be reached."),
                detail=_("Wait, and send the same request with the same key again: it may have been executed."),
                retryable=True,
                retry_after=jittered(1),
            )
    raise refusal


def _translated(error: MalformedKey) -> str:
    text = gettext(error.template)
    return text % error.values if error.values else text


def jittered(seconds: int) -> int:
    """Return ``seconds`` plus a random part, up to half as many or 1: clients refused together come back spread out."""
    return seconds + random.randint(0, max(1, seconds // 2))


def problem_response(
    problem: Problem, *, status: int | None = None, make: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    members = problem.members() | ({"status": status} if status else {})
    response = make(json.dumps(members), content_type=PROBLEM_JSON, status=status or problem.status)
    for name, value in problem.headers():
        response.headers[name] = value
    return response


def mark_refusal(response: HttpResponseBase) -> None:
    """Mark ``response`` for an outer entry point: it is not a view's response and must not be stored as one."""
    response._idempotency_refusal = True  # type: ignore[attr-defined]


def is_refusal(response: object) -> bool:
    return hasattr(response, "_idempotency_refusal")
