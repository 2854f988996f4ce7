"""The test project's, with the settings that a test gives a worker or a relay in
``WORKER_SETTINGS``, as JSON.
"""

from __future__ import annotations

import json
import os

from testproject.settings import *  # noqa: F403

globals().update(json.loads(os.environ.get("WORKER_SETTINGS", "{}")))
