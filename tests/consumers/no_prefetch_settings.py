"""The test project's, with workers that take no message while they have one for each of their processes."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403

CELERY_WORKER_DISABLE_PREFETCH = True
