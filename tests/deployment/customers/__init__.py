"""A user's project with its own tests: another user model, two databases, Django's test runner."""

from __future__ import annotations
