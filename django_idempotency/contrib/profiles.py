"""Policies by which published protocols treat idempotency keys.

Each function returns a ``Policy`` that states what its protocol demands, whatever the
settings say. Derive it for what is yours: ``acp().derive(mode="lease")``.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Literal

from django.core.exceptions import BadRequest
from django.http import HttpRequest, JsonResponse, RawPostDataException

from django_idempotency import Key, Policy, Problem
from django_idempotency.extending.requests import canonical_json

HOUR = 60 * 60  # seconds
SERVER_ERRORS = range(500, 600)
# They say nothing of the operation, which the same caller may yet have run.
BEFORE_THE_OPERATION = (401, 403, 429)
# Stripe keeps no result of a request that it refused before it ran.
REFUSED = (400, 401, 403, 404, 405, 406, 415, 422, 429)
ACP_CODES = {
    "idempotency_key_missing": "idempotency_key_required",
    "idempotency_key_reused": "idempotency_conflict",
    "idempotency_key_in_use": "idempotency_in_flight",
}


def acp(*, mismatch: Literal[422, 409] = 422) -> Policy:
    """Return the policy of the Agentic Commerce Protocol, version 2026-04-17, for
    agentic checkout and delegated payment.

    ``mismatch``: the status for a key that comes with another body; 409 for delegated
    authentication and affiliate attribution.
    https://github.com/agentic-commerce-protocol/agentic-commerce-protocol
    """
    return CHECKOUT.derive(
        retention=24 * HOUR,
        fingerprint=_json_of,
        echo_key=True,
        problems=partial(_flat, mismatch),
    )


def ucp() -> Policy:
    """Return the policy of the Universal Commerce Protocol, version 2026-04-08.

    https://ucp.dev/2026-04-08/specification/signatures/
    """
    return CHECKOUT.derive(
        key=ANY_KEY.derive(min_length=22),
        retention=48 * HOUR,
        fingerprint=_digest_of,
        problems=_code_and_content,
    )


def stripe() -> Policy:
    """Return a policy that treats keys as version 1 of Stripe's API does.

    https://docs.stripe.com/api/idempotent_requests
    """
    return Policy(
        required=False,
        key=ANY_KEY,
        methods=["POST"],
        retention=24 * HOUR,
        scope_path=False,
        release_statuses=REFUSED,
        retry_statuses=(),
        problems=_envelope,
    )


ANY_KEY = Key(source="Idempotency-Key", pattern=None, min_length=1, strict=False)
# What both protocols for checkouts demand.
CHECKOUT = Policy(
    key=ANY_KEY,
    required=True,
    methods=["POST", "PUT"],  # PUT updates carts, and UCP's checkouts
    anonymous="refuse",
    scope_path=True,
    release_statuses=BEFORE_THE_OPERATION,
    retry_statuses=SERVER_ERRORS,
    fail_open=False,
)


# --- What is compared -----------------------------------------------------------------


def _body(request: HttpRequest) -> bytes:
    try:
        return request.body
    except RawPostDataException:  # a form, which was parsed
        raise BadRequest("The body has to be JSON.") from None


def _json_of(request: HttpRequest) -> bytes:
    body = _body(request)
    try:
        return canonical_json(body)
    except ValueError:
        return body


def _digest_of(request: HttpRequest) -> bytes:
    return hashlib.sha256(_body(request)).digest()


# --- Errors ---------------------------------------------------------------------------


def _flat(mismatch: int, problem: Problem, request: HttpRequest) -> JsonResponse:
    is_server = problem.status >= 500
    error = {
        "type": "service_unavailable" if is_server else "invalid_request",
        "code": ACP_CODES.get(problem.code, problem.code),
        "message": _message(problem),
    }
    return JsonResponse(error, status=_status(problem, mismatch))


def _code_and_content(problem: Problem, request: HttpRequest) -> JsonResponse:
    error = {"code": problem.code, "content": _message(problem)}
    return JsonResponse(error, status=_status(problem, 409))


def _envelope(problem: Problem, request: HttpRequest) -> JsonResponse:
    error = {
        "type": "api_error" if problem.status >= 500 else "idempotency_error",
        "code": problem.code,
        "message": _message(problem),
    }
    retry = {"Stripe-Should-Retry": "true" if problem.retryable else "false"}
    return JsonResponse({"error": error}, status=_status(problem, 400), headers=retry)


def _status(problem: Problem, mismatch: int) -> int:
    return mismatch if problem.code == "idempotency_key_reused" else problem.status


def _message(problem: Problem) -> str:
    return str(problem.detail or problem.title)
