"""The test project on psycopg's connection pool."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES

DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 8}}
