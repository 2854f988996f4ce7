"""A response in the form in which a record stores it: as it is, or encrypted.

Nothing here raises. What can't be encrypted is not stored, and what can't be decrypted
is not replayed. The record remains without its response, a replay says so, and the log
says why, without quoting the response.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django_idempotency.conf import conf
from django_idempotency.models import IdempotencyRecord, in_utc
from django_idempotency.reporting.logs import is_due, log_lost_response
from django_idempotency.values.fingerprints import digest
from django_idempotency.values.outcomes import Operation, Snapshot, StoredResponse
from django_idempotency.values.policy import REQUIRE, Policy

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# Replaces the headers, with the id of the key. No header has this name, because a name
# can't contain a colon.
ENCRYPTED = ":encrypted"
VERSION = b"3"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Binding:
    """What an encrypted response is bound to: its record, in one life, from the claim
    that made the record, or began it anew.

    Nothing else can decrypt the response. ``created_at``: the database's time, in
    UTC. ``view``: what to call it in the log.
    """

    id: UUID
    scope: str
    key: str
    fingerprint: bytes
    created_at: datetime
    view: str = ""

    @classmethod
    def of(
        cls, of: Operation | Snapshot, created_at: datetime, view: str = ""
    ) -> Binding:
        return cls(of.id, of.scope, of.key, of.fingerprint, created_at, view)


def binding_of(record: IdempotencyRecord) -> Binding:
    assert record._state.db is not None  # it was read
    created_at = in_utc(record.created_at, record._state.db)
    return Binding(
        record.pk, record.scope, record.key, bytes(record.fingerprint), created_at
    )


def lack_of_encryption() -> str | None:
    """Return why nothing can be encrypted; ``None`` if it can."""
    if not conf().encryption:
        return "there is no encryption key"
    return (
        None
        if find_spec("cryptography")
        else "the package cryptography is not installed"
    )


def encrypted(response: StoredResponse, binding: Binding) -> StoredResponse | None:
    """Return a response, headers included, encrypted with the newest key and bound
    to ``binding``; ``None`` if it can't be.
    """
    if not response.has_content:
        return response
    try:
        key = conf().encryption[0]
        text = encrypt(_packed(response), key, _bound(response, binding))
        return StoredResponse(response.status, ((ENCRYPTED, key_id(key)),), text)
    except (
        Exception
    ) as error:  # a replay without its content is better than a lost response
        what = "could not be encrypted, and is not stored"
        log_lost_response(what, binding.id, binding.view, error)
        return None


def replayable(
    response: StoredResponse, binding: Binding, policy: Policy
) -> StoredResponse:
    """Return ``decoded``, without its content if ``policy`` requires encryption and it
    is not encrypted.
    """
    if (
        policy.body.encrypt == REQUIRE
        and response.has_content
        and not is_encrypted(response)
    ):
        _report("is not encrypted, and is not replayed", binding, "")
        return response.without_content()
    return decoded(response, binding)


def decoded(response: StoredResponse, binding: Binding) -> StoredResponse:
    """Return the response that a record stores in its ``binding``, decrypted if it is
    encrypted.
    """
    if not is_encrypted(response):
        return response
    try:
        keys = {key_id(key): key for key in conf().encryption}
        if response.body is None:  # it was dropped
            return response.without_content()
        return _unpacked(
            response.status,
            decrypt(
                response.body, keys[response.headers[0][1]], _bound(response, binding)
            ),
        )
    except Exception as error:
        # a missing key or package, a damaged row: in any case, the key must not run
        # again
        _report(
            "could not be decrypted, and is not replayed",
            binding,
            response.headers[0][1],
            error,
        )
        return response.without_content()


def _report(
    what: str, binding: Binding, key_id: str, error: Exception | None = None
) -> None:
    if is_due(f"response {key_id}"):
        log_lost_response(what, binding.id, binding.view, error)


def stored_response(record: IdempotencyRecord) -> StoredResponse | None:
    """Return the response that ``record`` stores, decrypted if it is encrypted;
    ``None`` if it has none.

    A body that is not stored, or can't be decrypted, is ``None``.
    """
    if record.response_status is None:
        return None
    stored = StoredResponse.of(
        record.response_status, record.response_headers, record.response_body
    )
    return decoded(stored, binding_of(record))


def is_encrypted(response: StoredResponse) -> bool:
    return response.headers[:1] != () and response.headers[0][0] == ENCRYPTED


def encryption_key_of(headers: Any, has_body: bool) -> str | None:
    """Return the id of the key that a stored response needs, an empty text if it is in
    clear, ``None`` without content.

    An encrypted response has no content left once its body is dropped.
    """
    response = StoredResponse.of(200, headers, b"")
    if is_encrypted(response):
        return response.headers[0][1] if has_body else None
    return "" if has_body or response.headers else None


def has_newest_key(headers: Any) -> bool:
    """Return whether content with these headers is encrypted with the newest key."""
    return encryption_key_of(headers, True) == key_id(conf().encryption[0])


def key_id(key: bytes) -> str:
    """Return an id that distinguishes an encryption key from others and reveals nothing
    about it.
    """
    return hashlib.sha256(b"django-idempotency key " + key).hexdigest()[:8]


def _packed(response: StoredResponse) -> bytes:
    head = json.dumps([response.headers, response.body is not None])  # in one line
    return head.encode() + b"\n" + (response.body or b"")


def _unpacked(status: int, packed: bytes) -> StoredResponse:
    head, _newline, body = packed.partition(b"\n")
    headers, has_body = json.loads(head)
    return StoredResponse(
        status, tuple(map(tuple, headers)), body if has_body else None
    )


def _bound(response: StoredResponse, binding: Binding) -> bytes:
    """Return what binds an encrypted response to one life of its own record, and to its
    own status.
    """
    who = [
        text.encode("utf-8", "surrogatepass") for text in (binding.scope, binding.key)
    ]
    created = ((binding.created_at - EPOCH) // timedelta(microseconds=1)).to_bytes(
        8, "big"
    )
    return digest(
        [
            VERSION,
            *who,
            binding.fingerprint,
            created,
            response.status.to_bytes(2, "big"),
        ]
    )


# --- AES-256-GCM, which needs the extra ``cryptography`` ------------------------------

SALT, NONCE = 32, 12
PURPOSE = b"django-idempotency response"


def encrypt(plain: bytes, key: bytes, bound: bytes) -> bytes:
    """Return ``plain`` encrypted with a key of 32 bytes. It can be read only with
    ``bound``, which is not in it.

    Each message has its own key, derived with a random salt, so that any number of
    messages is safe.
    """
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    return salt + nonce + _cipher(key, salt).encrypt(nonce, plain, bound)


def decrypt(encrypted: bytes, key: bytes, bound: bytes) -> bytes:
    """Return what ``encrypt`` was given. Raises an error if the key or ``bound``
    differs, or if a byte was changed.
    """
    salt, nonce, text = (
        encrypted[:SALT],
        encrypted[SALT : SALT + NONCE],
        encrypted[SALT + NONCE :],
    )
    return _cipher(key, salt).decrypt(nonce, text, bound)


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(hmac.digest(key, PURPOSE + salt, "sha256"))
