"""The payments service, with one endpoint more."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.faults.urls"
# What a released request wrote stays by default, as without a key, and the retry writes it anew: an effect that no
# client was told of. Undone, it is a law again that each key has one.
IDEMPOTENCY = {**IDEMPOTENCY, "ON_RELEASE": "rollback"}  # noqa: F405
if CLAIM == "mixed":  # noqa: F405  # as while a deployment goes on: each process has the one kind or the other
    IDEMPOTENCY["CLAIM"] = ("record", "lock")[os.getpid() % 2]
if STORE == "redis":  # noqa: F405
    STORES["redis"]["OPTIONS"]["durability"] = os.environ.get("REDIS_DURABILITY", "none")  # noqa: F405
