"""Operations of Django Ninja."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def api():
    from ninja import NinjaAPI

    return NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)
