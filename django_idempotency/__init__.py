"""Exactly-once requests and messages for Django: claim a key, run once, replay the first response."""

from __future__ import annotations

__version__ = "0.1.0"
