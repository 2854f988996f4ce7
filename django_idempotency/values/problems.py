"""The package's own responses to requests: problem documents (RFC 9457) as values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import responses as PHRASES
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_idempotency.values.exceptions import (
    AnonymousKey,
    IdempotencyError,
    MalformedKey,
    MissingKey,
    NotAdmitted,
    ReplayForbidden,
    RequestIncomplete,
    StoreUnavailable,
    UnusableKey,
)
from django_idempotency.values.outcomes import (
    InFlight,
    Mismatch,
    OnHold,
    StoredResponse,
)

PROBLEM_JSON = "application/problem+json"
NO_STORE = "no-store"
NO_TYPE = "about:blank"  # RFC 9457 section 4.2.1


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the package's own responses, in the terms of RFC 9457.

    ``retryable``: the same request with the same key may succeed later.
    ``safe_new_key``: it is certain that nothing was ever done under this key, so
    sending the request under a new key does nothing twice. ``base`` is the setting
    ``PROBLEM_TYPE_BASE_URL``. Without it a problem has no type of its own, so that its
    title is HTTP's phrase for the status, and ``detail`` says it all.
    """

    status: int
    code: str
    title: str | Promise
    detail: str | Promise = ""
    retryable: bool = False
    safe_new_key: bool = False
    retry_after: int | None = None

    def members(self, base: str | None) -> dict[str, Any]:
        title, detail = str(self.title), str(self.detail)
        if base is None and self.status in PHRASES:
            title, detail = PHRASES[self.status], f"{title} {detail}".strip()
        return {
            "type": self._type(base),
            "title": title or detail,
            "status": self.status,
            "detail": detail or title,
            "code": self.code,
            "retryable": self.retryable,
            "safe_new_key": self.safe_new_key,
        }

    def headers(self, base: str | None) -> Iterator[tuple[str, str]]:
        yield "Cache-Control", NO_STORE
        if base is not None:
            yield "Link", f'<{self._type(base)}>; rel="describedby"'
        if self.retry_after is not None:
            yield "Retry-After", str(self.retry_after)
        # else the caller has to do something first
        if self.retry_after is not None or not self.retryable:
            yield "X-Should-Retry", "true" if self.retryable else "false"

    def response(self, base: str | None) -> StoredResponse:
        headers = ("Content-Type", PROBLEM_JSON), *self.headers(base)
        return StoredResponse(
            self.status, headers, json.dumps(self.members(base)).encode()
        )

    def _type(self, base: str | None) -> str:
        return NO_TYPE if base is None else base + self.code


Refusal = InFlight | OnHold | Mismatch | IdempotencyError

# ``safe_new_key`` is true only if no record can exist. After an outage, an expired
# session or a rebuilt body, the operation may have been executed under the key.
PROBLEMS: Mapping[type, Problem] = {
    MissingKey: Problem(
        400,
        "idempotency_key_missing",
        _("This operation needs an idempotency key, but the request has none."),
        _(
            "Generate a key for the operation, and send the same key with every retry"
            " of it."
        ),
        safe_new_key=True,
    ),
    MalformedKey: Problem(
        400,
        "idempotency_key_malformed",
        _("The request has no usable idempotency key."),
    ),
    AnonymousKey: Problem(
        400,
        "idempotency_key_anonymous",
        _("The server can't tell whose idempotency key this is."),
        _(
            "If the request was not authenticated, authenticate and send it again with"
            " the same key: it may have been executed. If it was, the server has to"
            " define a scope for such callers."
        ),
        retryable=True,
    ),
    RequestIncomplete: Problem(
        400,
        "request_incomplete",
        _("The body of the request is shorter than its Content-Length."),
        _("Nothing was run. Send the whole request again with the same key."),
        retryable=True,
    ),
    ReplayForbidden: Problem(
        403,
        "replay_forbidden",
        _("You may not see the response of this operation."),
        _(
            "It was executed, and will not be executed again. Callers who may see the"
            " response still get it."
        ),
    ),
    NotAdmitted: Problem(
        429,
        "idempotency_key_not_admitted",
        _("A new operation can't be accepted now."),
        _("Nothing was run. Wait, and send the same request with the same key again."),
        retryable=True,
    ),
    InFlight: Problem(
        409,
        "idempotency_key_in_use",
        _("A request with this idempotency key is being executed."),
        _("Wait, and send the same request with the same key again."),
        retryable=True,
    ),
    OnHold: Problem(
        409,
        "idempotency_key_on_hold",
        _("An operator has to decide whether the operation took place."),
        _(
            "It may have been executed. Ask the operator before you send it under any"
            " key."
        ),
    ),
    Mismatch: Problem(
        422,
        "idempotency_key_reused",
        _("The idempotency key was first used with another request."),
        _(
            "Its method, path, query or body differs. Send a retry exactly as it was"
            " first sent; use a new key only for another operation."
        ),
    ),
    StoreUnavailable: Problem(
        503,
        "idempotency_store_unavailable",
        _("The idempotency store can't be reached."),
        _(
            "Wait, and send the same request with the same key again: it may have been"
            " executed."
        ),
        retryable=True,
        retry_after=1,
    ),
}

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

BY_CODE = {each.code: each for each in (*PROBLEMS.values(), NOT_STORED, MARKED_FAILED)}


def problem(refusal: Refusal) -> Problem:
    """Return the problem document for an outcome or an error. Raises an error that
    stands for no response.
    """
    of_kind = next(
        (PROBLEMS[kind] for kind in type(refusal).__mro__ if kind in PROBLEMS), None
    )
    if of_kind is None:
        assert isinstance(refusal, IdempotencyError)
        raise refusal
    if isinstance(refusal, UnusableKey):
        is_safe = of_kind.safe_new_key or refusal.never_used
        of_kind = replace(of_kind, safe_new_key=is_safe)
        if not refusal.template:
            return of_kind
        return replace(of_kind, detail=gettext(refusal.template) % refusal.values)
    after = getattr(refusal, "retry_after", of_kind.retry_after)
    return of_kind if after is None else replace(of_kind, retry_after=jittered(after))


def jittered(seconds: int) -> int:
    """Return ``seconds`` plus a random part, up to half as many or 1: clients refused
    together come back spread out.
    """
    return seconds + random.randint(0, max(1, seconds // 2))
