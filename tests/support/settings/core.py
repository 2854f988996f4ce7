"""The test project without a wing, for a checkout from which they are deleted."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import IDEMPOTENCY, INSTALLED_APPS

INSTALLED_APPS = [
    app for app in INSTALLED_APPS if not app.startswith("django_idempotency.contrib.")
]
IDEMPOTENCY = {name: value for name, value in IDEMPOTENCY.items() if name != "OUTBOX"}
STEPS = False
