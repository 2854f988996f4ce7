from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.core.cache import cache

from tests.support.callers import PAYER


@pytest.fixture(autouse=True)
def shop(settings):
    settings.ROOT_URLCONF = "tests.contrib.testing.shop"
    settings.MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]
    settings.CACHES = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    }
    cache.clear()


@pytest.fixture
def customer(db):
    """The one who pays for every order, in the transaction of the test."""
    return get_user_model().objects.create_user(PAYER)
