"""Parse keys from headers, and derive identifiers from scope and key. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from contextlib import suppress
from typing import Any
from uuid import UUID

import http_sf
from django.utils.translation import gettext_noop

from django_idempotency.values.exceptions import MalformedKey

DEFAULT_HEADER = "Idempotency-Key"
MAX_LENGTH = 255

_VISIBLE = re.compile(r"[!-~]+")
# A bare key can't contain characters that would make it a list, a parameter or an
# unfinished string.
_BARE = re.compile(r'[^\s",;\\]+')


def parse_key(value: str, header: str = DEFAULT_HEADER, strict: bool = False) -> str:
    """Return the key in the value of the field of ``header``.

    The field is an RFC 9651 Item whose value is a String
    (draft-ietf-httpapi-idempotency-key-header, section 2.1). Unless ``strict``, a bare
    token is the same key as the quoted string.

    Raises ``MalformedKey`` unless the key is 1 to 255 visible ASCII characters.
    """
    value = value.strip(" \t")
    if not value:
        raise MalformedKey(
            gettext_noop(
                "The header %(name)s is empty; send 1 to 255 visible ASCII characters."
            ),
            never_used=True,
            name=header,
        )
    is_bare = not strict and _BARE.fullmatch(value)
    return usable(
        value if is_bare or not value.isascii() else _parse_string(value, header)
    )


def usable(key: str) -> str:
    """Return ``key``. Raises ``MalformedKey`` unless it is 1 to 255 visible ASCII
    characters.
    """
    if len(key) > MAX_LENGTH:
        raise MalformedKey(
            gettext_noop(
                "The idempotency key has %(length)d characters; at most %(most)d are"
                " allowed."
            ),
            never_used=True,
            length=len(key),
            most=MAX_LENGTH,
        )
    if not _VISIBLE.fullmatch(key):
        raise MalformedKey(
            gettext_noop(
                "The idempotency key %(key)s must consist of visible ASCII characters;"
                " a UUID is a good key."
            ),
            never_used=True,
            key=ascii(key),
        )
    return key


def _parse_string(value: str, header: str) -> str:
    parsed: Any = [None]
    with suppress(ValueError, http_sf.StructuredFieldError):
        parsed = http_sf.parse(value.encode(), tltype="item")
    key = parsed[0]
    if not isinstance(key, str):  # a token is none
        raise MalformedKey(
            gettext_noop(
                "The header %(name)s, %(value)s, is not one quoted string such as"
                ' "8e03978e-40d5".'
            ),
            name=header,
            value=_shown(value),
        )
    return key


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 64 else f"{value[:64]}…")


def record_id(scope: str, key: str) -> UUID:
    """Return the record's primary key: a digest of the key, followed by a digest of
    scope and key.
    """
    return _uuid(_digest(key), _digest(f"{len(scope)}:{scope}{key}"))


def id_range(key: str) -> tuple[UUID, UUID]:
    """Return the first and the last primary key that a raw key can have in any
    scope.
    """
    return _uuid(_digest(key), bytes(8)), _uuid(_digest(key), b"\xff" * 8)


def is_record_id(id: UUID) -> bool:
    """Return whether ``id`` can be the primary key of a record."""
    return not id.int & CLEARED


# If these bits are set, MariaDB treats a UUID as one with a version and reorders or
# refuses it.
CLEARED = 1 << 79 | 1 << 63


def _uuid(first: bytes, second: bytes) -> UUID:
    return UUID(int=int.from_bytes(first + second, "big") & ~CLEARED)


def child_key(parent: UUID, name: str, secret: bytes | None = None) -> str:
    """Return a key for one downstream call: the same for every attempt of the parent.
    It doesn't reveal the raw key.

    Without ``secret``, anybody who knows the parent can compute it.
    """
    text = parent.bytes + name.encode()
    digest = (
        hashlib.sha256(text).digest()
        if secret is None
        else hmac.digest(secret, b"child key" + text, "sha256")
    )
    return str(UUID(bytes=digest[:16]))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
