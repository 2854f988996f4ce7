"""Results of handlers, as their records keep them, so that a redelivery gets what the
first delivery got.
"""

from __future__ import annotations

import json
import logging
from enum import Enum
from inspect import isawaitable, iscoroutine
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.reporting.logs import log
from django_idempotency.values.outcomes import Operation, StoredResponse
from django_idempotency.values.policy import Policy

JSON = "application/json"
DONE = 200
REJECTED = 422
ERRORS = 400  # and above


class NotKept(Enum):
    NOT_KEPT = "not kept"


NOT_KEPT = NotKept.NOT_KEPT
"""Stands for a result that was too large to keep, or could not be read again. Not
``None``, which a handler returns.
"""


class Codec(Protocol):
    """Turns results into bytes and back. ``encode`` raises ``TypeError`` or
    ``ValueError`` if it can't hold one.
    """

    content_type: str

    def encode(self, result: Any) -> bytes: ...

    def decode(self, body: bytes) -> Any: ...


class PlainJSON:
    """JSON, for results that it does not change."""

    content_type = JSON

    def encode(self, result: Any) -> bytes:
        try:
            body = json.dumps(result)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"A result can't be kept: {error}. Return what JSON can represent, such"
                " as the text of a date or a Decimal."
            ) from error
        if json.loads(body) != result:  # a tuple, or a dict with keys that are not text
            raise TypeError(
                f"A replay of {result!r:.100} would differ; return something that JSON"
                " can represent."
            )
        return body.encode()

    def decode(self, body: bytes) -> Any:
        return json.loads(body)


PLAIN_JSON = PlainJSON()


# --- In the record --------------------------------------------------------------------


def stored_result(result: Any, codec: Codec, policy: Policy) -> StoredResponse:
    """Return a result as it is kept, without its body if that is too large. Raises
    ``TypeError``.
    """
    return _stored(DONE, codec.encode(result), codec.content_type, policy)


def stored_rejection(reason: str, policy: Policy) -> StoredResponse:
    return _stored(REJECTED, json.dumps(reason).encode(), JSON, policy)


def _stored(
    status: int, body: bytes, content_type: str, policy: Policy
) -> StoredResponse:
    kept = body if len(body) <= policy.body.limit else None
    return StoredResponse(status, (("Content-Type", content_type),), kept)


def final(result: Any) -> Any:
    """Return ``result``. Raises ``ImproperlyConfigured`` if it has to be awaited: the
    handler has done nothing yet.
    """
    if not isawaitable(result):
        return result
    if iscoroutine(result):
        result.close()
    raise ImproperlyConfigured(
        f"{result!r} has to be awaited: nothing was done. Make the handler sync, or use"
        " aconsume()."
    )


def result_of(response: StoredResponse, codec: Codec, operation: Operation) -> Any:
    """Return the result that the record of ``operation`` keeps, or ``NOT_KEPT`` if its
    body was not kept or can't be read.

    A result that an operator wrote is JSON, text or nothing.
    """
    if response.body is None:
        return NOT_KEPT
    if not response.body:
        return None
    content_type = dict(response.headers).get("Content-Type", "")
    try:
        if content_type == codec.content_type:
            return codec.decode(response.body)
        text = response.body.decode()
        return json.loads(text) if "json" in content_type else text
    except Exception as error:  # a codec may raise anything
        log(
            logging.WARNING,
            "result_unreadable",
            "a stored result can't be read: %s",
            type(error).__name__,
            operation=operation,
        )
        return NOT_KEPT


def reason_of(response: StoredResponse) -> str:
    """Return in a sentence why the message failed, according to its record."""
    try:
        content = json.loads(response.body or b"null")
    except ValueError:
        content = (response.body or b"").decode("utf-8", "replace")
    if isinstance(content, dict):
        content = content.get("detail") or content.get("title") or json.dumps(content)
    return str(content or f"it failed before, with status {response.status}")
