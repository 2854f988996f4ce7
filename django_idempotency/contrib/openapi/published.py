"""What a policy means for its callers, in words and in JSON Schema: for OpenAPI
documents and the published policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from django_idempotency import Fingerprint, Policy
from django_idempotency.extending import FOR_GOOD
from django_idempotency.extending.requests import (
    MAX_LENGTH,
    PROBLEM_JSON,
    PROBLEMS,
    BodyField,
    routes,
    view_class,
)

WHAT: dict[str, dict[str, str]] = {
    "type": {"format": "uri"},
    "code": {"description": "Stable; identifies the kind of problem."},
    "retryable": {
        "description": "The same request with the same key may succeed later."
    },
    "safe_new_key": {"description": "Nothing was ever done under this key."},
}
KINDS = {str: "string", int: "integer", bool: "boolean"}
MEMBERS = PROBLEMS["idempotency_key_in_use"].members(None)
PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "A problem document (RFC 9457).",
    "properties": {
        name: {"type": KINDS[type(value)]} | WHAT.get(name, {})
        for name, value in MEMBERS.items()
    },
    "required": [name for name in MEMBERS if name != "detail"],
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
WITHOUT_BODY = ("204", "205", "304")
WITH_RETRY_AFTER = ("409", "429", "503")
CODES: dict[str, list[str]] = {}
for known in PROBLEMS.values():
    CODES.setdefault(str(known.status), []).append(known.code)


def key_schema(policy: Policy) -> dict[str, Any]:
    """Return the requirements on the key as a JSON Schema. In a header it may be in
    quotes, which don't count towards its length.
    """
    quotes = QUOTES if policy.key.meta_name else 0
    shortest = policy.key.min_length + (quotes if policy.key.strict else 0)
    schema = {"type": "string", "minLength": shortest, "maxLength": MAX_LENGTH + quotes}
    pattern = policy.key.pattern and f"(?:{policy.key.pattern.pattern})"
    if not policy.key.meta_name:
        return schema | ({"pattern": f"^{pattern}$"} if pattern else {})
    quote = '"' if policy.key.strict else '"?'
    length = "" if policy.key.strict else f'(?="|.{{1,{MAX_LENGTH}}}$)'
    stated = f"{quote}{pattern}{quote}$" if pattern else ""
    return schema | ({"pattern": f"^{length}{stated}"} if length or stated else {})


def key_description(policy: Policy) -> str:
    """Return where the key is, and what a caller has to know about it."""
    form = ""
    if policy.key.meta_name:
        form = ", as a quoted string (RFC 9651)"
        form += "" if policy.key.strict else ", or bare"
    return (
        f"The key {key_place(policy)} names this operation. Send a new one, such as a"
        " UUID, with each new operation, and the same one with every retry of it."
        f" Visible ASCII{form}."
    )


def key_place(policy: Policy) -> str:
    """Return where a caller has to put the key."""
    if isinstance(source := policy.key.source, str):
        return f"in the header {source}"
    if isinstance(source, BodyField):
        return f"in the field {source.name} of the body"
    return "that the server finds in the request"


def own_responses(policy: Policy) -> dict[str, str]:
    """Return the responses that the package itself may send, by status, with the codes
    of its problem documents; none if the project makes them.
    """
    if policy.problems is not None:
        return {}
    waits = " Requests wait for it first." if policy.wait else ""
    responses = {
        "400": "The key is missing, malformed, or not usable by an anonymous caller.",
        "409": (
            "An earlier request with this key is still running, or its outcome is on"
            f" hold for an operator.{waits}"
        ),
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


def add(responses: dict[str, Any], deferred: Mapping[str, Any]) -> None:
    """Add the responses of a view that defers an operation. What the project says of
    them stays.
    """
    for status, response in deepcopy(deferred).items():
        stated = responses.get(status, {})
        headers = response["headers"] | stated.get("headers", {})
        responses[status] = response | stated | {"headers": headers}


def describe(
    responses: dict[str, Any], policy: Policy, problem: dict[str, Any]
) -> None:
    """Add replays and the package's own responses to the ``responses`` of an operation
    in an OpenAPI document.

    ``problem``: the schema of a problem document, or a reference to it. What the
    project says of a status stays.
    """
    for status, response in responses.items():
        response["headers"] = response.get("headers", {}) | REPLAYED
        if status[0] in "23" and status not in WITHOUT_BODY:  # response_not_stored
            response.setdefault("content", {}).setdefault(
                PROBLEM_JSON, {"schema": problem}
            )
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
    refused = "is refused" if policy.problems else "gets 422"
    place = "" if policy.key.meta_name else f", {key_place(policy)},"
    return (
        f"Idempotency: a retry with the same key{place} gets the first response"
        f" {remembered(policy)}. {compared(policy)}; a key that is sent with another"
        f" request {refused}. A response that was not stored, for example because it"
        " is too large, is replayed as its status with a problem document, code"
        f" response_not_stored.{_receipts(policy)}"
    )


def _receipts(policy: Policy) -> str:
    """Return where a caller finds what became of a key, if that is in the URLconf."""
    found = [
        route
        for route, view in routes()
        if hasattr(view_class(view), "receipt_schema") and "<" not in route
    ]
    if not found or not policy.key.meta_name or policy.scope_path:
        return ""
    return (
        f" GET {found[0]} with the same key shows whether the operation has ended, and"
        " its response, and runs nothing."
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


def remembered(policy: Policy) -> str:
    """Return for how long a key is remembered, in the largest unit that divides it
    evenly.
    """
    seconds = policy.retention
    if seconds >= FOR_GOOD:
        return "for good"
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return f"for {seconds / size:g} {unit}{'s' * (seconds != size)}"
    return f"for {seconds:g} seconds"
