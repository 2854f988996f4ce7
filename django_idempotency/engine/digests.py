"""Digests that can't be guessed without a key: stored fingerprints and child keys.

A stored fingerprint is the id of a digest key, followed by the HMAC-SHA256, under that
key, of the record's id and the request's digest. Without any digest key it is the
request's digest itself. A fingerprint that was emptied has no bytes. A record keeps its
digest key for one life, so a rotation changes neither what a retry is compared with nor
the record's child keys.
"""

from __future__ import annotations

import hmac
import json
import logging
from dataclasses import replace

from django_idempotency.conf import KEY_ID, conf
from django_idempotency.reporting.logs import is_due, log
from django_idempotency.values import keys
from django_idempotency.values.fingerprints import digest
from django_idempotency.values.outcomes import Operation, StoredResponse

KEYED = KEY_ID + 32  # bytes
UNKEYED = b""


def keyed(operation: Operation) -> Operation:
    """Return ``operation``, whose fingerprint is its ``digest``, with its fingerprint
    under the newest key.
    """
    newest = next(iter(conf().digests), UNKEYED)
    return operation if newest == UNKEYED else _under(newest, operation)


def as_recorded(operation: Operation, fingerprint: bytes) -> Operation | None:
    """Return ``operation`` with its fingerprint under the key of the stored
    ``fingerprint``, for a comparison.

    If that key is not in the settings, log an error and return ``None``.
    """
    if fingerprint == operation.fingerprint:
        return operation
    key_id = key_id_of(fingerprint)
    if (
        not fingerprint
        or operation.digest is None
        or key_id == key_id_of(operation.fingerprint)
    ):
        return operation
    if key_id != UNKEYED and key_id not in conf().digests:
        if is_due(f"digest key {key_id.hex()}"):
            message = (
                "a fingerprint can't be compared: the digest key %s is not in the"
                " settings"
            )
            log(
                logging.ERROR,
                "digest_key_missing",
                message,
                key_id.hex(),
                operation=operation,
            )
        return None
    return _under(key_id, operation)


def _under(key_id: bytes, operation: Operation) -> Operation:
    assert operation.digest is not None
    if key_id == UNKEYED:
        return replace(operation, fingerprint=operation.digest)
    text = b"fingerprint" + operation.id.bytes + operation.digest
    return replace(
        operation,
        fingerprint=key_id + hmac.digest(conf().digests[key_id], text, "sha256"),
    )


def key_id_of(fingerprint: bytes) -> bytes:
    """Return the id of the digest key of a stored fingerprint; ``b""`` if it has
    none.
    """
    return fingerprint[:KEY_ID] if len(fingerprint) == KEYED else UNKEYED


def child_key(operation: Operation, name: str) -> str:
    """Return a key for one downstream call of ``operation``, under the key of its
    fingerprint.
    """
    key_id = key_id_of(operation.fingerprint)
    return keys.child_key(
        operation.id, name, None if key_id == UNKEYED else conf().digests[key_id]
    )


def response_digest(response: StoredResponse) -> str:
    """Return a digest of status, headers and body, for the history of a record.

    It is made under the newest digest key: ``hmac-sha256:``, the id of the key, a colon
    and 64 hexadecimal digits. Without a digest key it is ``sha256:`` and the digits.
    """
    key_id = next(iter(conf().digests), UNKEYED)
    parts = [
        str(response.status).encode(),
        json.dumps(response.headers).encode(),
        response.body or b"",
    ]
    plain = digest([b"response", *parts])
    if key_id == UNKEYED:
        return f"sha256:{plain.hex()}"
    keyed = hmac.digest(conf().digests[key_id], b"response" + plain, "sha256")
    return f"hmac-sha256:{key_id.hex()}:{keyed.hex()}"
