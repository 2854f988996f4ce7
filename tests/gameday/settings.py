"""The test project with metrics, short leases, a short retention, and keys that are put
on hold.
"""

from __future__ import annotations

from django_idempotency import Lease
from testproject.settings import *  # noqa: F403
from testproject.settings import IDEMPOTENCY as OF_THE_PROJECT

ROOT_URLCONF = "tests.gameday.urls"
IDEMPOTENCY = {
    **OF_THE_PROJECT,
    "INSTRUMENTATION": ["prometheus"],
    "LEASE": Lease(seconds=5, on_crash="hold"),
    "RETENTION": 90,  # longer than a run of the forms and a wait for it, together
}
INSTRUMENTATION = ["prometheus"]
