"""The schedule of the passes for Celery beat, which settings may import."""

from __future__ import annotations

from django_idempotency.contrib.partitions.apps import PASSES
from django_idempotency.tasks import beat_schedule

BEAT_SCHEDULE = beat_schedule(*PASSES)
