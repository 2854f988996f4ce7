"""Steps are refused where their effects and their memo can't be committed together."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import modify_settings

from django_idempotency.contrib import steps
from tests.contrib.redis.records import use
from tests.contrib.steps.conftest import run
from tests.support.callers import effects, pay, stop_heartbeat
from tests.support.checks import ids_found

IN_MEMORY = {"memory": {"BACKEND": "tests.stores.memory.MemoryStore"}}
IS_HOME = connection.vendor == "postgresql"
# MariaDB and SQLite, where these tests run on them
UNFIT = ["memory", *([] if IS_HOME else ["default"])]


@pytest.mark.not_on_citus
@pytest.mark.parametrize("store", UNFIT)
@pytest.mark.parametrize("kind", [steps.atomic, steps.call], ids=["atomic", "call"])
def test_records_without_the_effects_beside_them_are_refused(settings, kind, store):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "STORES": IN_MEMORY}
    with pytest.raises(ImproperlyConfigured, match="committed together"):
        run(lambda: kind("a", lambda *_key: pay("x")), store=store)
    assert effects("x") == 0


@pytest.mark.redis
@pytest.mark.parametrize("kind", [steps.atomic, steps.call], ids=["atomic", "call"])
def test_records_in_redis_are_refused(settings, redis_url, kind):
    use(settings, redis_url)
    with pytest.raises(ImproperlyConfigured, match="committed together"):
        run(lambda: kind("a", lambda *_key: pay("x")), store="redis")
    stop_heartbeat()
    assert effects("x") == 0


@modify_settings(INSTALLED_APPS={"remove": ["django_idempotency.contrib.steps"]})
def test_steps_without_their_app_say_what_to_add():
    with pytest.raises(ImproperlyConfigured, match="Add 'django_idempotency"):
        run(lambda: steps.atomic("a", lambda: pay("x")))
    assert effects("x") == 0


@pytest.mark.not_on_citus
def test_a_check_says_where_steps_are_refused():
    found = ids_found(label="django_idempotency_steps")
    assert found == ([] if IS_HOME else ["W001"])
