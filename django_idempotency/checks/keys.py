"""Checks of encryption and digest keys: weak ones, and those that records need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections

from django_idempotency.checks.databases import record_databases
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.conf import conf, decoded_key
from django_idempotency.digests import UNKEYED, key_id_of
from django_idempotency.maintenance.records import HAS_BODY, records
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.codec import encryption_key_of, key_id

SAMPLE = 1000  # records from each end
FEWEST = 16  # distinct bytes; one random key in 10 ** 20 has fewer
# The keys that are printed in the documentation.
EXAMPLES = frozenset(
    map(
        decoded_key,
        ["q7m0bq3Z0bQ2S3o0b1l1Z0b1c2d3e4f5g6h7i8j9k0E=", "mB0X4nZk2f8s1yq0m3o5V7t9h2a4c6e8g1i3k5l7n9Q="],
    )
)


@register(Tags.compatibility)
def check_keys(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E090: keys that can be guessed, or are set twice."""
    if not are_usable():
        return []
    settings = {"ENCRYPTION_KEYS": conf().encryption, "DIGEST_KEYS": conf().own_digest_keys}
    times = Counter(key for keys in settings.values() for key in keys)
    return [
        Error(
            f"{name}: the key at index {index} {why}.",
            hint="Generate one with: openssl rand -base64 32",
            id="django_idempotency.E090",
        )
        for name, keys in settings.items()
        for index, key in enumerate(keys)
        if (why := weakness(key) or ("is listed twice" if times[key] > 1 else None))
    ]


def weakness(key: bytes) -> str | None:
    """Return why ``key`` can't come from a random generator, or is not secret; ``None`` if neither is known."""
    if key in EXAMPLES:
        return "is an example from the documentation"
    if all(32 <= byte < 127 for byte in key):
        return "is text"
    steps = {(later - before) % 256 for before, later in pairwise(key)}
    return "is not random" if min(len(set(key)), len(steps)) < FEWEST else None


@register(Tags.database)
def check_needed_keys(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E091: keys that records need, but the settings lack."""
    wanted = sorted(set(databases or ()) & record_databases())
    return [message for using in wanted if _has_table(using) for message in _missing(using)]


def _has_table(using: str) -> bool:
    return IdempotencyRecord._meta.db_table in connections[using].introspection.table_names()


def _missing(using: str) -> Iterator[CheckMessage]:
    """Look at the records that are purged first, whose keys are the oldest, and at those that are purged last."""
    ended = records(using).terminal().annotate(has_body=HAS_BODY)
    told = ended.values_list("response_headers", "has_body", "fingerprint")
    found = [*told.order_by("purge_at")[:SAMPLE], *told.order_by("-purge_at")[:SAMPLE]]
    digests = {key_id_of(bytes(fingerprint)) for _headers, _has_body, fingerprint in found} - {UNKEYED}
    encryption = {encryption_key_of(headers, has_body) or "" for headers, has_body, _fingerprint in found} - {""}
    missing = {
        "is not in ENCRYPTION_KEYS": encryption - set(map(key_id, conf().encryption)),
        "is neither in DIGEST_KEYS nor derived from ENCRYPTION_KEYS": {
            id.hex() for id in digests - conf().digests.keys()
        },
    }
    for where, ids in missing.items():
        for id in sorted(ids):
            yield Error(
                f"Records in the database {using!r} need the key {id}, which {where}.",
                hint="Put the key back, after the others, until its records have expired.",
                id="django_idempotency.E091",
            )
