"""The payments service, with one endpoint more."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.faults.urls"
