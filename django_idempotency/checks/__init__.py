"""System checks, which find what is wrong with a configuration before it costs money.

A wing of the package registers checks of its own from its ``AppConfig``: ``register(CHECKS, label=…, page=…)``.
"""

from __future__ import annotations

from django_idempotency.checks.project import Database, Project, Source
from django_idempotency.checks.registry import Check, each, register

__all__ = ["Check", "Database", "Project", "Source", "each", "register"]
