"""The test project's, for a worker that takes pickled tasks."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403

CELERY_ACCEPT_CONTENT = ["json", "pickle"]
