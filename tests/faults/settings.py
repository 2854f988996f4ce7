"""The payments service, with one more endpoint."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.faults.urls"
# By default, what a released request wrote stays, as without a key, and the retry writes it again: an effect that no
# client was told of. If it is rolled back, it is a law again that each key has one effect.
IDEMPOTENCY = {**IDEMPOTENCY, "ON_RELEASE": "rollback"}  # noqa: F405
if CLAIM == "mixed":  # noqa: F405  # as during a deployment: each process has one kind or the other
    IDEMPOTENCY["CLAIM"] = ("record", "lock")[os.getpid() % 2]
if STORE == "redis":  # noqa: F405
    STORES["redis"]["OPTIONS"]["durability"] = os.environ.get("REDIS_DURABILITY", "none")  # noqa: F405
