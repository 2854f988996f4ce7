"""``KeyedAPIClient``: a key for each call, and the same for its retry."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.testing.rest_framework import KeyedAPIClient
from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry

pytestmark = pytest.mark.usefixtures("customer")


@pytest.fixture
def api():
    return KeyedAPIClient()


def test_each_call_has_a_key_of_its_own_and_a_retry_the_same(api):
    first = api.post("/orders/", {"item": "book"}, format="json")
    key = api.key
    assert api.retry().content == first.content
    assert (api.key, LedgerEntry.objects.count()) == (key, 1)
    second = api.post("/orders/", {"item": "book"}, format="json")
    assert second.content != first.content
    assert api.key != key
    assert set(IdempotencyRecord.objects.values_list("key", flat=True)) == {key, api.key}


@pytest.mark.parametrize(
    "stated", [{"headers": {"idempotency-key": '"mine"'}}, {"HTTP_IDEMPOTENCY_KEY": '"mine"'}], ids=["headers", "extra"]
)
def test_a_key_of_the_test_is_kept(api, stated):
    api.put("/orders/", {"item": "book"}, format="json", **stated)
    assert (api.key, IdempotencyRecord.objects.get().key) == ("mine", "mine")


def test_a_key_among_the_credentials_is_kept(api):
    api.credentials(HTTP_IDEMPOTENCY_KEY="mine")
    api.delete("/orders/")
    assert (api.key, IdempotencyRecord.objects.get().key) == ("mine", "mine")


def test_safe_methods_have_no_key(api):
    api.get("/orders/")
    assert api.key is None
    with pytest.raises(RuntimeError, match="no request to retry"):
        api.retry()


def test_the_body_of_a_retry_is_the_same(api):
    first = api.patch("/headers/", {"item": "book"}, format="json").json()
    again = api.retry().json()
    assert (again["Content-Type"], again["Content-Length"]) == (first["Content-Type"], first["Content-Length"])
