"""The test project, with what else leaves records: encryption, claims by lock, and the
outbox with an inbox.
"""

from __future__ import annotations

from testproject.settings import *

ROOT_URLCONF = "versions.urls"
IDEMPOTENCY["ENCRYPTION_KEYS"] = ["KHX0puinFLGcJ8VFGfT6Hz8mE3/bmyHdceXpgu2kgnA="]
IDEMPOTENCY["OUTBOX"]["PUBLISHERS"] = {
    "default": {
        "BACKEND": "django_idempotency.contrib.outbox.publishers.local.LocalPublisher",
        "OPTIONS": {"handler": "testproject.consumers.receive"},
    }
}
# A payout that waits in a step's transaction would keep the migration waiting.
STEPS = False
