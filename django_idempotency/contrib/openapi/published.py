"""What a policy means for its callers, in words and in JSON Schema: for OpenAPI documents and the published policy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django_idempotency.values.keys import MAX_LENGTH
from django_idempotency.values.policy import Fingerprint, Policy
from django_idempotency.values.problems import PROBLEM_JSON

PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "A problem document (RFC 9457).",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {
            "type": "string",
            "description": "Stable; identifies the kind of problem.",
        },
        "retryable": {
            "type": "boolean",
            "description": "The same request with the same key may succeed later.",
        },
        "safe_new_key": {
            "type": "boolean",
            "description": "Nothing was ever done under this key.",
        },
    },
    "required": ["type", "title", "status", "code", "retryable", "safe_new_key"],
}
RETRY_AFTER = {
    "Retry-After": {
        "schema": {"type": "integer"},
        "description": "Seconds to wait before the next try.",
    }
}
REPLAYED = {
    "Idempotent-Replayed": {
        "schema": {"type": "string", "enum": ["true"]},
        "description": "Sent with a stored response that is replayed.",
    }
}
QUOTES = 2  # characters
WITH_RETRY_AFTER = ("409", "429", "503")
CODES = {
    "400": (
        *(
            "idempotency_key_missing",
            "idempotency_key_malformed",
            "idempotency_key_anonymous",
        ),
        "request_incomplete",
    ),
    "403": ("replay_forbidden",),
    "409": ("idempotency_key_in_use", "idempotency_key_on_hold"),
    "422": ("idempotency_key_reused",),
    "429": ("idempotency_key_not_admitted",),
    "503": ("idempotency_store_unavailable",),
}


def key_schema(policy: Policy) -> dict[str, Any]:
    """Return the requirements on the header with the key, which may be in quotes, as a JSON Schema."""
    shortest = policy.keys.min_length + QUOTES * policy.keys.strict
    schema = {"type": "string", "minLength": shortest, "maxLength": MAX_LENGTH + QUOTES}
    if policy.keys.pattern is None:
        return schema
    quote = '"' if policy.keys.strict else '"?'
    return schema | {"pattern": f"^{quote}(?:{policy.keys.pattern.pattern}){quote}$"}


def key_description(policy: Policy) -> str:
    """Return what a caller has to know about the key."""
    return (
        "Names this operation. Send a new one, such as a UUID, with each new operation, and the same one with "
        "every retry of it. Visible ASCII, as a quoted string"
        + (" (RFC 9651)." if policy.keys.strict else ", or bare.")
    )


def own_responses(policy: Policy) -> dict[str, str]:
    """Return the responses that the package itself may send, by status, with the codes of its problem documents."""
    waits = " Requests wait for it first." if policy.wait else ""
    responses = {
        "400": "The key is missing, malformed, or not usable by an anonymous caller.",
        "409": f"An earlier request with this key is still running, or its outcome is on hold for an operator.{waits}",
        "422": "The key was first used with another request.",
    }
    if policy.may_replay is not None:
        responses["403"] = (
            "The operation was executed, and the caller may not see its response."
        )
    if policy.admit is not None:
        responses["429"] = (
            "The key is new, and no new keys are admitted now. Retry with the same key."
        )
    if not policy.fail_open:
        responses["503"] = (
            "The idempotency store can't be reached. Retry with the same key."
        )
    return {
        status: f"{text} {_codes(status, policy)}" for status, text in responses.items()
    }


def describe(
    responses: dict[str, Any], policy: Policy, problem: dict[str, Any]
) -> None:
    """Add replays and the package's own responses to the ``responses`` of an operation in an OpenAPI document.

    ``problem``: the schema of a problem document, or a reference to it. What the project says of a status stays.
    """
    for response in responses.values():
        response["headers"] = response.get("headers", {}) | REPLAYED
    for status, description in own_responses(policy).items():
        content = {PROBLEM_JSON: {"schema": problem}}
        if status == "400":  # which a view sends for reasons of its own, too
            content["application/json"] = {"schema": {}}
        headers = {"headers": RETRY_AFTER} if status in WITH_RETRY_AFTER else {}
        responses.setdefault(
            status, {"description": description, "content": content, **headers}
        )


def _codes(status: str, policy: Policy) -> str:
    never = {"idempotency_key_missing"} if not policy.required else set()
    codes = [code for code in CODES[status] if code not in never]
    return f"Code{'s' * (len(codes) > 1)}: {', '.join(codes)}."


def retry_rules(policy: Policy) -> str:
    """Return the published policy of an operation, as the draft of the header asks for.

    https://www.ietf.org/archive/id/draft-ietf-httpapi-idempotency-key-header-07.html#section-2.3
    """
    return (
        f"Idempotency: a retry with the same key gets the first response for {duration(policy.retention)}. "
        f"{compared(policy)}; a key that comes with another request gets 422. A response that was not stored, for "
        "example because it is too large, is replayed as its status with a problem document, code response_not_stored."
    )


def status_rules(policy: Policy) -> str:
    """Return what happens to the key after each status of the operation."""
    again = set(policy.retry_statuses) - set(policy.release_statuses)
    freed = (
        f"After {_ranges(policy.release_statuses)} the key is free again. "
        if policy.release_statuses
        else ""
    )
    retried = f"After {_ranges(again)} a retry is run again. " if again else ""
    return f"{freed}{retried}Every other response is stored, and replayed to retries."


def _ranges(statuses: Collection[int]) -> str:
    """Return the statuses as text, such as ``400, 422, 500–599``."""
    runs: list[list[int]] = []
    for status in sorted(statuses):
        if runs and status == runs[-1][-1] + 1:
            runs[-1].append(status)
        else:
            runs.append([status])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )


def compared(policy: Policy) -> str:
    """Return which parts of a request have to be the same in a retry."""
    headers = ", ".join(sorted(policy.compared_headers))
    return _content_compared(policy) + (
        f", and the headers {headers}" if headers else ""
    )


def _content_compared(policy: Policy) -> str:
    if not isinstance(compared := policy.fingerprint, Fingerprint):
        return "The parts that identify the request are compared"
    if compared.only is not None:
        return f"Of the body, {', '.join(sorted(compared.only))} are compared"
    if compared.exclude:
        return (
            f"All of the body except {', '.join(sorted(compared.exclude))} is compared"
        )
    return "Method, path, query and body are compared"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that divides it evenly."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}{'s' * (seconds != size)}"
    return f"{seconds:g} seconds"
