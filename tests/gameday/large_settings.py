"""The test project with a key to encrypt stored responses with, and connections that last."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES
from testproject.settings import IDEMPOTENCY as OF_THE_PROJECT

DATABASES["default"]["CONN_MAX_AGE"] = 600
IDEMPOTENCY = {**OF_THE_PROJECT, "ENCRYPTION_KEYS": [b64encode(sha256(b"game day").digest()).decode()]}
