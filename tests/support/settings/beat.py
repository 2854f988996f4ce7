"""The test project's schedule for beat, an hour for all of it, on a queue of the test's own."""

from __future__ import annotations

import os

from django_idempotency.tasks import BEAT_SCHEDULE as EVERY_MINUTE
from django_idempotency.tasks import BODIES_BEAT_SCHEDULE
from testproject.settings import *  # noqa: F403

CELERY_BEAT_SCHEDULE = {
    name: entry | {"schedule": 3600.0} for name, entry in (EVERY_MINUTE | BODIES_BEAT_SCHEDULE).items()
}
CELERY_TASK_DEFAULT_QUEUE = os.environ["TEST_QUEUE"]
