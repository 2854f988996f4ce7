"""The test project's, with a broker that takes an unacknowledged message for lost after two seconds."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403

CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 2}
