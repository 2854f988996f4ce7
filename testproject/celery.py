from __future__ import annotations

import os

from celery import Celery

from django_idempotency.tasks import BEAT_SCHEDULE

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

app = Celery("testproject")
app.config_from_object("django.conf:settings", namespace="CELERY")
# Here, not in the settings: the processes that serve requests need not import Celery.
app.conf.beat_schedule = app.conf.beat_schedule or BEAT_SCHEDULE
app.autodiscover_tasks()
