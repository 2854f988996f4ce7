"""The test project, with what else leaves records: encryption, claims by lock, and the outbox with an inbox."""

from __future__ import annotations

from testproject.settings import *

ROOT_URLCONF = "versions.urls"
IDEMPOTENCY["ENCRYPTION_KEYS"] = ["q7m0bq3Z0bQ2S3o0b1l1Z0b1c2d3e4f5g6h7i8j9k0E="]
IDEMPOTENCY["OUTBOX"]["PUBLISHERS"] = {
    "default": {
        "BACKEND": "django_idempotency.outbox.publishers.local.InboxPublisher",
        "OPTIONS": {"handler": "testproject.consumers.write_receipt", "consumer": "receipts"},
    }
}
