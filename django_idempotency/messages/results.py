"""Results of handlers, as their records keep them: typed, so that a redelivery gets what the first delivery got."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import isawaitable, iscoroutine
from typing import Any, Protocol
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import Promise

from django_idempotency.policy import Policy
from django_idempotency.reporting.logs import log
from django_idempotency.values.outcomes import StoredResponse

JSON = "application/json"
DONE = 200
REJECTED = 422
ERRORS = 400  # and above
TYPE, VALUE = "__type__", "__value__"


class NotKept(Enum):
    NOT_KEPT = "not kept"


NOT_KEPT = NotKept.NOT_KEPT
"""Stands for a result that was too large to keep, or could not be read again. Not ``None``, which a handler returns."""


class Codec(Protocol):
    """Turns results into bytes and back. ``encode`` raises ``TypeError`` or ``ValueError`` if it can't hold one."""

    content_type: str

    def encode(self, result: Any) -> bytes: ...

    def decode(self, body: bytes) -> Any: ...


class TypedJSON:
    """JSON that keeps the types of dates, times, decimals, UUIDs, bytes, tuples, sets and keys that are not text.

    These values become objects with two members, ``__type__`` and ``__value__``. The rest is plain JSON.
    """

    content_type = JSON

    def encode(self, result: Any) -> bytes:
        return json.dumps(_tagged(result)).encode()

    def decode(self, body: bytes) -> Any:
        return json.loads(body, object_hook=_untagged)


TYPED_JSON = TypedJSON()


def _items(value: Iterable[Any]) -> list[Any]:
    return [_tagged(item) for item in value]


# By the name in ``__type__``: the type, how it is written, and how it is read. datetime comes before date, its base.
_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda it: timedelta(*it)),
    "uuid": (UUID, str, UUID),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "tuple": (tuple, _items, tuple),
    "set": (set, _items, set),
    "frozenset": (frozenset, _items, frozenset),
    "dict": (dict, lambda value: _items(map(list, value.items())), dict),
}


def _tagged(value: Any) -> Any:
    match value:
        case None | str() | bool() | int() | float():
            return value
        case list():
            return _items(value)
        case dict() if all(isinstance(name, str) for name in value) and value.keys() != {TYPE, VALUE}:
            return {name: _tagged(item) for name, item in value.items()}
        case Promise():
            return str(value)
    for name, (kind, write, _read) in _TYPES.items():
        if isinstance(value, kind):
            return {TYPE: name, VALUE: write(value)}
    raise TypeError(
        f"A result of type {type(value).__qualname__} can't be kept; return something that JSON can represent."
    )


def _untagged(value: dict[str, Any]) -> Any:
    if value.keys() != {TYPE, VALUE} or value[TYPE] not in _TYPES:
        return value
    _kind, _write, read = _TYPES[value[TYPE]]
    return read(value[VALUE])


# --- In the record ---------------------------------------------------------------------------------------------------


def stored_result(result: Any, codec: Codec, policy: Policy) -> StoredResponse:
    """Return a result as it is kept, without its body if that is too large. Raises ``TypeError``."""
    return _stored(DONE, codec.encode(result), codec.content_type, policy)


def stored_rejection(reason: str, policy: Policy) -> StoredResponse:
    return _stored(REJECTED, json.dumps(reason).encode(), JSON, policy)


def _stored(status: int, body: bytes, content_type: str, policy: Policy) -> StoredResponse:
    kept = body if len(body) <= policy.body.limit else None
    return StoredResponse(status, (("Content-Type", content_type),), kept)


def final(result: Any) -> Any:
    """Return ``result``. Raises ``ImproperlyConfigured`` if it has to be awaited: the handler has done nothing yet."""
    if not isawaitable(result):
        return result
    if iscoroutine(result):
        result.close()
    raise ImproperlyConfigured(
        f"{result!r} has to be awaited: nothing was done. Make the handler sync, or use aconsume()."
    )


def result_of(response: StoredResponse, codec: Codec) -> Any:
    """Return the result that a record keeps, or ``NOT_KEPT`` if its body was not kept or can't be read.

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
        log(logging.WARNING, "result_unreadable", "a stored result can't be read: %s", type(error).__name__)
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
