"""Encrypt bytes with AES-256-GCM. This needs the ``cryptography`` extra."""

from __future__ import annotations

import hmac
import os

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT, NONCE, TAG = 32, 12, 16
OVERHEAD = SALT + NONCE + TAG  # bytes that encryption adds to a text
PURPOSE = b"django-idempotency response"


def encrypt(plain: bytes, key: bytes, bound: bytes) -> bytes:
    """Return ``plain`` encrypted with a key of 32 bytes. It can be read only with ``bound``, which is not in it.

    Each message has its own key, derived with a random salt, so that any number of messages is safe.
    """
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    return salt + nonce + AESGCM(_derived(key, salt)).encrypt(nonce, plain, bound)


def decrypt(encrypted: bytes, key: bytes, bound: bytes) -> bytes:
    """Return what ``encrypt`` was given. Raises an error if the key or ``bound`` differs, or if a byte was changed."""
    salt, nonce, text = encrypted[:SALT], encrypted[SALT : SALT + NONCE], encrypted[SALT + NONCE :]
    return AESGCM(_derived(key, salt)).decrypt(nonce, text, bound)


def _derived(key: bytes, salt: bytes) -> bytes:
    return hmac.digest(key, PURPOSE + salt, "sha256")
