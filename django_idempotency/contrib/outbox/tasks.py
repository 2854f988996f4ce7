"""The schedule of the outbox's clean-up for Celery beat, which settings may import."""

from __future__ import annotations

from django_idempotency.contrib.outbox.apps import CLEANUP
from django_idempotency.tasks import beat_schedule

BEAT_SCHEDULE = beat_schedule(CLEANUP)
