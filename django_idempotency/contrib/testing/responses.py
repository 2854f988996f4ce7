"""Whether two responses are the same to a client, which may be any: Django's, REST framework's, httpx's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from django_idempotency.http.problems import NOT_STORED, PROBLEM_JSON
from django_idempotency.http.responses import REPLAYED, is_about_caching, is_browsable_page, may_be_stored

# These headers belong to one response of the server, not to the operation.
OF_ONE_RESPONSE = frozenset({REPLAYED.lower(), "server-timing", "x-request-id"})
SHOWN = 200


def differences(first: Any, second: Any) -> Iterator[str]:
    """Describe how status and body differ. The body is compared only if it is stored."""
    if first.status_code != second.status_code:
        yield f"status {first.status_code}, then {second.status_code}"
    if _is_stored(first, second) and first.content != second.content:
        yield f"body {_shown(first.content)}, then {_shown(second.content)}"


def differences_of_headers(first: Any, second: Any, ignore: Collection[str] = ()) -> Iterator[str]:
    """Describe how headers differ that are the same in a replay. ``ignore``: names of headers to leave out."""
    if not _is_stored(first, second):  # the headers describe the body
        return
    left_out = OF_ONE_RESPONSE.union(name.lower() for name in ignore)
    before, after = (
        {
            name: value
            for name, value in ((name.lower(), value) for name, value in response.headers.items())
            if name not in left_out and may_be_stored(name) and not is_about_caching(name)
        }
        for response in (first, second)
    )
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield f"header {name} {before.get(name)!r}, then {after.get(name)!r}"


def _is_stored(first: Any, second: Any) -> bool:
    """Whether the body is stored as it is: it is not a stream, not too large, and not a page of the browsable API."""
    unstored = _streams(first) or _streams(second) or is_browsable_page(first)
    return not unstored and code(second) != NOT_STORED.code


def _streams(response: Any) -> bool:
    return bool(getattr(response, "streaming", False))


def code(response: Any) -> str | None:
    """Return the ``code`` of a problem response; ``None`` for any other response."""
    if _streams(response) or PROBLEM_JSON not in response.headers.get("Content-Type", ""):
        return None
    try:
        found = json.loads(response.content)
    except ValueError:
        return None
    return found.get("code") if isinstance(found, dict) else None


def described(response: Any) -> str:
    if _streams(response):
        return f"{response.status_code}, streamed"
    return f"{response.status_code} {_shown(response.content)}"


def _shown(content: bytes) -> str:
    return repr(content if len(content) <= SHOWN else content[:SHOWN] + b"...")
