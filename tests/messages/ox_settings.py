"""The test project's, with django-ox as the backend of Django's tasks."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_ox"]
TASKS = {"default": {"BACKEND": "django_ox.backend.OxBackend"}}
