"""The test project's settings, with the options of the outbox from the environment."""

from __future__ import annotations

import json
import os

from testproject.settings import *  # noqa: F403

IDEMPOTENCY = {"OUTBOX": json.loads(os.environ["OUTBOX"])}
