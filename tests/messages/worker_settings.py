"""The test project's, with the settings that a test gives a worker or a relay in
``WORKER_SETTINGS``, as JSON.
"""

from __future__ import annotations

import json
import os

from testproject.settings import *  # noqa: F403

# seconds; on a busy machine a child may not be up within the usual four
CELERY_WORKER_PROC_ALIVE_TIMEOUT = 60

globals().update(json.loads(os.environ.get("WORKER_SETTINGS", "{}")))
