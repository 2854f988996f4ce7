"""Encryption and digest keys that can be guessed, or are set twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from django_idempotency.conf import EXAMPLES, Conf

FEWEST = 16  # distinct bytes; one random key in 10 ** 20 has fewer


def weak_keys(settings: Conf) -> Iterator[tuple[str, int, str]]:
    keys = {"ENCRYPTION_KEYS": settings.encryption, "DIGEST_KEYS": settings.own_digest_keys}
    times = Counter(key for values in keys.values() for key in values)
    for name, values in keys.items():
        for index, key in enumerate(values):
            if why := weakness(key) or ("is listed twice" if times[key] > 1 else None):
                yield name, index, why


def weakness(key: bytes) -> str | None:
    """Return why ``key`` can't come from a random generator, or is not secret; ``None`` if neither is known."""
    if key in EXAMPLES:
        return "is an example from the documentation"
    if all(32 <= byte < 127 for byte in key):
        return "is text"
    steps = {(later - before) % 256 for before, later in pairwise(key)}
    return "is not random" if min(len(set(key)), len(steps)) < FEWEST else None
