"""Fixtures that wings share with the core's tests."""

from __future__ import annotations

from tests.messages.conftest import start_consumer

__all__ = ["start_consumer"]
