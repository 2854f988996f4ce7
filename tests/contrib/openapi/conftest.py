"""Operations of Django Ninja."""

from __future__ import annotations

from tests.http.test_ninja_openapi import api

__all__ = ["api"]
