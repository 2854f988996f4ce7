"""Encrypt bytes with AES-256-GCM, by the ``cryptography`` extra."""

from __future__ import annotations

import hmac
import os

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT, NONCE, TAG = 32, 12, 16
OVERHEAD = SALT + NONCE + TAG  # bytes by which a text is longer once it is encrypted
PURPOSE = b"django-idempotency response"


def encrypt(plain: bytes, key: bytes, bound: bytes) -> bytes:
    """``plain`` under a key of 32 bytes, to be read only together with ``bound``, which is not in it.

    Each message has a key of its own, derived with a random salt, so that there is no end to how many are safe.
    """
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    return salt + nonce + AESGCM(_derived(key, salt)).encrypt(nonce, plain, bound)


def decrypt(encrypted: bytes, key: bytes, bound: bytes) -> bytes:
    """What ``encrypt`` was given. Raises an error if the key or ``bound`` is another, or a byte was changed."""
    salt, nonce, text = encrypted[:SALT], encrypted[SALT : SALT + NONCE], encrypted[SALT + NONCE :]
    return AESGCM(_derived(key, salt)).decrypt(nonce, text, bound)


def _derived(key: bytes, salt: bytes) -> bytes:
    return hmac.digest(key, PURPOSE + salt, "sha256")
