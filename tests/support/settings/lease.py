"""The payments service with every view in lease mode and a lease that a test can
outlive.
"""

from __future__ import annotations

from importlib.util import find_spec

from django_idempotency import Lease

if find_spec("django_idempotency.contrib"):
    from testproject.settings import *  # noqa: F403
else:
    from tests.support.settings.core import *  # noqa: F403

IDEMPOTENCY = {"MODE": "lease", "LEASE": Lease(seconds=6)}  # type: ignore[dict-item]
