"""Which part of a response is kept: redacted by the policy's callable, with or without its body.

Nothing here raises. What can't be redacted is not stored, and the log says why, without quoting the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

from django.db import connections

from django_idempotency.logs import log_lost_response
from django_idempotency.outcomes import StoredResponse, is_storable
from django_idempotency.policy import Policy, Redact


def redacted(response: StoredResponse, id: UUID, policy: Policy) -> StoredResponse:
    """Return the response as the policy lets the record ``id`` keep it. A replay returns that."""
    if policy.redact is not None and response.has_content:
        response = _by(policy.redact, response, id)
    return response if policy.store_body else replace(response, body=None)


def _by(redact: Redact, response: StoredResponse, id: UUID) -> StoredResponse:
    try:
        with _no_queries():
            kept = redact(response)
        if not is_storable(kept):
            raise TypeError("redact must return a StoredResponse of text headers and a body of bytes or None.")
        return replace(kept, status=response.status)
    except Exception as error:  # the project's code, after the effects: it may lose the copy, never the response
        log_lost_response("could not be redacted, and is not stored", id, error)
        return response.without_content()


@contextmanager
def _no_queries() -> Iterator[None]:
    """Refuse queries inside the block: a failed query would break the business transaction."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            stack.enter_context(connection.execute_wrapper(_refuse))
        yield


def _refuse(*_query: Any) -> NoReturn:
    raise RuntimeError("redact must not query a database.")
