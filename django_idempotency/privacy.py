"""What of an answer is kept, and in what form: redacted, left out, encrypted.

Nothing here raises. What can't be redacted or encrypted is not stored, and what can't be decrypted is not replayed: the
record stands without its answer, a replay says so, and the log says why, without a word of the answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

from django.db import connections

from django_idempotency.conf import conf
from django_idempotency.logs import log
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Policy, Redact

# Stands where the headers were, with the id of the key. No header is called that: a colon can't be in a name.
ENCRYPTED = ":encrypted"
LENGTH = 4
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def kept(response: StoredResponse, id: UUID, policy: Policy) -> StoredResponse:
    """What the policy lets the record ``id`` keep of an answer: that is what a replay answers."""
    if policy.redact is not None and _has_answer(response):
        response = _redacted(response, id, policy.redact)
    return response if policy.store_body else replace(response, body=None)


def sealed(response: StoredResponse, id: UUID, policy: Policy) -> StoredResponse:
    """An answer as the record ``id`` stores it: as it is, or encrypted, or without what can't be."""
    if not policy.encrypt:
        return response
    return encrypted(response, id) or _without_answer(response)


def encrypted(response: StoredResponse, id: UUID) -> StoredResponse | None:
    """An answer of the record ``id``, encrypted with the newest key, headers too; ``None`` if it can't be."""
    if not _has_answer(response):
        return response
    try:
        from django_idempotency.encryption import encrypt

        key = conf().encryption[0]
        text = encrypt(_packed(response), key, _bound(response, id))
        return StoredResponse(response.status, ((ENCRYPTED, key_id(key)),), text)
    except Exception as error:
        _log("could not be encrypted, and is not stored", id, error)
        return None


def opened(response: StoredResponse, id: UUID) -> StoredResponse:
    """The answer that the record ``id`` stores, decrypted if it is encrypted."""
    if not is_encrypted(response):
        return response
    try:
        from django_idempotency.encryption import decrypt

        keys = {key_id(key): key for key in conf().encryption}
        if response.body is None:  # dropped since
            return _without_answer(response)
        return _unpacked(response.status, decrypt(response.body, keys[response.headers[0][1]], _bound(response, id)))
    except Exception as error:
        _log("could not be decrypted, and is not replayed", id, error)
        return _without_answer(response)


def is_encrypted(response: StoredResponse) -> bool:
    return response.headers[:1] != () and response.headers[0][0] == ENCRYPTED


def key_id(key: bytes) -> str:
    """What tells an encryption key from others, and nothing of it."""
    return hashlib.sha256(b"django-idempotency key " + key).hexdigest()[:8]


def _has_answer(response: StoredResponse) -> bool:
    return response.body is not None or bool(response.headers)


def _without_answer(response: StoredResponse) -> StoredResponse:
    return StoredResponse(response.status, body=None)


def _redacted(response: StoredResponse, id: UUID, redact: Redact) -> StoredResponse:
    try:
        with _no_queries():
            redacted = redact(response)
        if not is_storable(redacted):
            raise TypeError("redact must return a StoredResponse of text headers and a body of bytes or None.")
        return replace(redacted, status=response.status)
    except Exception as error:
        _log("could not be redacted, and is not stored", id, error)
        return _without_answer(response)


@contextmanager
def _no_queries() -> Iterator[None]:
    """A query that failed would take the business transaction along."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            stack.enter_context(connection.execute_wrapper(_refuse))
        yield


def _refuse(*_query: Any) -> NoReturn:
    raise RuntimeError("redact must not query a database.")


def is_storable(response: Any) -> bool:
    """Whether it is an answer that can be kept, and sent: with headers that are ones, and bytes or nothing."""
    return (
        isinstance(response, StoredResponse)
        and (response.body is None or isinstance(response.body, bytes))
        and all(isinstance(text, str) for header in response.headers for text in header)
        and all(_NAME.fullmatch(name) and _is_value(value) for name, value in response.headers)
    )


def _is_value(value: str) -> bool:
    return not set("\0\r\n") & set(value) and max(value, default="") <= "\xff"


def _packed(response: StoredResponse) -> bytes:
    head = json.dumps([response.headers, response.body is not None]).encode()
    return len(head).to_bytes(LENGTH, "big") + head + (response.body or b"")


def _unpacked(status: int, packed: bytes) -> StoredResponse:
    end = LENGTH + int.from_bytes(packed[:LENGTH], "big")
    headers, has_body = json.loads(packed[LENGTH:end])
    pairs = tuple((name, value) for name, value in headers)
    return StoredResponse(status, pairs, packed[end:] if has_body else None)


def _bound(response: StoredResponse, id: UUID) -> bytes:
    """With this an encrypted answer can be read only in its own record, beside its own status."""
    return id.bytes + response.status.to_bytes(2, "big")


def _log(what: str, id: UUID, error: Exception) -> None:
    # Not its text, nor its traceback: either may hold a piece of the answer.
    place = traceback.extract_tb(error.__traceback__)[-1]
    told = (id, what, type(error).__name__, place.filename, place.lineno)
    log(logging.ERROR, "answer_lost", "the answer of idempotency record %s %s: %s at %s:%s", *told, record_id=id)
