"""System checks, which find what is wrong with a configuration before it costs money.

A wing of the package registers checks of its own from its ``AppConfig``:
``register(CHECKS, label=…, page=…)``.
"""

from __future__ import annotations

from django_idempotency.checks.registry import Check, each, register
from django_idempotency.checks.subjects import Database, Project, Source

__all__ = ["Check", "Database", "Project", "Source", "each", "register"]
