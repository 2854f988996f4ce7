"""What the policy lets a record keep of a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from django.db import connections

from django_idempotency.reporting.logs import log_lost_response
from django_idempotency.values.outcomes import (
    Keep,
    Operation,
    StoredResponse,
    Verdict,
    is_storable,
)
from django_idempotency.values.policy import Body, Redact

V = TypeVar("V", bound=Verdict)


def redacted(verdict: V, options: Body, operation: Operation) -> V:
    """Return ``verdict`` with the part of its response that the record of
    ``operation`` may keep. This never raises.
    """
    if not isinstance(verdict, Keep):
        return verdict
    response = verdict.response
    if options.redact is not None and response.has_content:
        response = _redacted(response, options.redact, operation)
    if not options.store:
        response = replace(response, body=None)
    return (
        verdict if response is verdict.response else replace(verdict, response=response)
    )


def _redacted(
    response: StoredResponse, redact: Redact, operation: Operation
) -> StoredResponse:
    """Return what ``redact`` makes of the response of ``operation``, or its status
    alone if that fails.

    The log says why it failed, without quoting the response.
    """
    try:
        with _no_queries():
            kept = redact(response)
        if not is_storable(kept):
            raise TypeError(
                "redact must return a StoredResponse of text headers and a body of"
                " bytes or None."
            )
        return replace(kept, status=response.status)
    except Exception as error:
        # the project's code, after the effects: it may lose the copy, never the
        # response
        what = "could not be redacted, and is not stored"
        log_lost_response(what, operation.id, operation.view, error)
        return response.without_content()


@contextmanager
def _no_queries() -> Iterator[None]:
    """Refuse queries inside the block: a failed query would break the business
    transaction.
    """
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            stack.enter_context(connection.execute_wrapper(_refuse))
        yield


def _refuse(*_query: Any) -> NoReturn:
    raise RuntimeError("redact must not query a database.")
