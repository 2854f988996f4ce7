"""The contract of a store: what keeps it passes, and what does not is caught."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_idempotency import stores
from django_idempotency.contrib.testing.stores import StoreContract
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.policy import Policy
from tests.stores import memory
from tests.stores.memory import LIARS, MemoryStore
from tests.support.callers import stop_heartbeat


def use(settings, store: type, **options):
    settings.IDEMPOTENCY = {
        "STORES": {
            "mine": {"BACKEND": f"{store.__module__}.{store.__qualname__}", **options}
        }
    }


@pytest.fixture(autouse=True)
def quiet():
    yield
    stop_heartbeat()


class Mine(StoreContract):
    alias = "mine"


class TestStoreOfAProject(Mine):
    @pytest.fixture(autouse=True)
    def configured(self, settings):
        use(settings, MemoryStore)


@pytest.mark.usefixtures("transactional_db")
class TestDatabase(StoreContract):
    """The store that a project has if it says nothing."""


@pytest.mark.not_on_citus
@pytest.mark.usefixtures("transactional_db")
class TestPortableDatabase(Mine):
    @pytest.fixture(autouse=True)
    def configured(self, settings, monkeypatch):
        monkeypatch.setattr(stores, "PostgreSQLStore", DatabaseStore)
        use(settings, DatabaseStore)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_a_store_that_lies_is_caught(settings, liar):
    use(settings, liar)
    assert liar.caught
    for test in [getattr(Mine(), name) for name in liar.caught]:
        with pytest.raises(Exception):  # noqa: B017, PT011 - a broken store may raise anything
            test()


def test_a_policy_chooses_its_store_and_another_has_the_database(settings):
    use(settings, MemoryStore)
    assert isinstance(store_for(Policy(mode="lease", store="mine")), MemoryStore)
    assert isinstance(store_for(Policy()), DatabaseStore)
    settings.IDEMPOTENCY = {
        "STORES": {"default": settings.IDEMPOTENCY["STORES"]["mine"]}
    }
    assert isinstance(store_for(Policy(mode="lease")), MemoryStore)


def test_atomic_mode_is_refused_by_a_store_without_transactions(settings):
    use(settings, MemoryStore)
    with pytest.raises(
        ImproperlyConfigured,
        match=r"'mine' \(MemoryStore\) can't commit .* set mode=\"lease\"",
    ):
        store_for(Policy(store="mine"))
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "STORE": "mine"}
    with pytest.raises(
        SystemCheckError,
        match=r"E024\) The IDEMPOTENCY setting: The policy is in atomic",
    ):
        call_command("check")


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        (
            {"STORES": {"redsi": {"BACKEND": "x.Y"}}, "STORE": "redis"},
            "STORES has no 'redis': did you mean 'redsi'?",
        ),
        (
            {"STORES": {"default": {"BACKEND": "nowhere.Store"}}},
            "the store 'default' can't be imported: ",
        ),
        (
            {"STORES": {"default": {"BACKEND": "builtins.dict"}}},
            "builtins.dict of 'default' is not a django_idempotency.",
        ),
        (
            {
                "STORES": {
                    "default": {
                        "BACKEND": f"{memory.__name__}.MemoryStore",
                        "OPTIONS": {"size": 1},
                    }
                }
            },
            (
                "the OPTIONS of 'default' can't be used: MemoryStore takes no options,"
                " but got size."
            ),
        ),
    ],
)
def test_a_store_that_cannot_be_made_is_an_error_that_says_why(settings, stated, told):
    settings.IDEMPOTENCY = {"MODE": "lease", **stated}
    with pytest.raises(ImproperlyConfigured) as refused:
        store_for(Policy(mode="lease", store=stated.get("STORE", "default")))
    assert told in str(refused.value)
    with pytest.raises(SystemCheckError, match=r"django_idempotency\.E023") as found:
        call_command("check")
    assert told in str(found.value)


@pytest.mark.parametrize(
    "stated",
    [[], {"a": "x.Y"}, {"a": {"BACKEND": 1}}, {"a": {"BACKEND": "x.Y", "OPTION": {}}}],
)
def test_stores_of_other_classes_are_an_error(settings, stated):
    settings.IDEMPOTENCY = {"STORES": stated}
    with pytest.raises(SystemCheckError, match=r"django_idempotency\.E001"):
        call_command("check")
