"""The payments service, with one more endpoint."""

from __future__ import annotations

import os
from dataclasses import replace

# as during a deployment: each process has one kind or the other
MIXED = os.environ.get("CLAIM") == "mixed"
if MIXED:
    os.environ["CLAIM"] = ("record", "lock")[os.getpid() % 2]
from testproject.settings import *  # noqa: E402, F403

if MIXED:
    os.environ["CLAIM"] = "mixed"  # for the processes that this one starts

ROOT_URLCONF = "tests.faults.urls"
# By default, what a released request wrote stays, as without a key, and the retry
# writes it again: an effect that no client was told of. If it is rolled back, it is a
# law again that each key has one effect.
IDEMPOTENCY = {
    **IDEMPOTENCY,  # noqa: F405
    "ATOMIC": replace(IDEMPOTENCY["ATOMIC"], on_release="rollback"),  # noqa: F405
}
if STORE == "redis":  # noqa: F405
    STORES["redis"]["OPTIONS"] |= {  # noqa: F405
        "durability": os.environ.get("REDIS_DURABILITY", "none"),
        "timeout": float(os.environ.get("REDIS_TIMEOUT", "2")),
    }
