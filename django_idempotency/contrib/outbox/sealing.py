"""Payload and headers of an event, encrypted with the keys of stored responses if the project's policy asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from django_idempotency.conf import conf
from django_idempotency.stores.codec import EPOCH, Life, decoded, encrypted, is_encrypted
from django_idempotency.values.outcomes import StoredResponse

# The log says what could not be encrypted or decrypted, and why.
Content = tuple[bytes, dict[str, str]]


def sealed(event_id: UUID, payload: bytes, headers: Mapping[str, str]) -> Content | None:
    """Return payload and headers as they are to be stored; ``None`` if they can't be encrypted."""
    body = conf().policy.body
    if not body.encrypt:
        return payload, dict(headers)
    stored = encrypted(_content(payload, headers), _life(event_id), body.padding)
    return None if stored is None else (stored.body or b"", dict(stored.headers))


def opened(event_id: UUID, payload: bytes, headers: Mapping[str, str]) -> Content | None:
    """Return payload and headers as they were published; ``None`` if they can't be decrypted."""
    if not is_sealed(headers):
        return payload, dict(headers)
    content = decoded(_content(payload, headers), _life(event_id))
    return None if content.body is None else (content.body, dict(content.headers))


def is_sealed(headers: Mapping[str, str]) -> bool:
    """Return whether an event with these headers is encrypted."""
    return is_encrypted(_content(b"", headers))


def _content(payload: bytes, headers: Mapping[str, str]) -> StoredResponse:
    return StoredResponse(200, tuple(headers.items()), payload)


def _life(event_id: UUID) -> Life:
    """Return what binds encrypted content to its event."""
    return Life(event_id, "outbox", str(event_id), b"", EPOCH)
