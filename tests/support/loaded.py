"""The project, loaded: with this a ``PausingProcess`` begins."""

from __future__ import annotations

import django

django.setup()
