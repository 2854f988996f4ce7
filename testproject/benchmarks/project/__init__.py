"""The service under load: one view, the same for every contender."""

from __future__ import annotations
