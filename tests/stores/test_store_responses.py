"""Responses, failures and releases, as every store keeps them."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    StoredResponse,
)
from django_idempotency.policy import Policy
from tests.stores.contract import ATOMIC, RESPONSE, claimed, shift

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.mark.parametrize("failure", [False, True])
def test_a_response_is_kept_to_the_byte(store, failure):
    claim = claimed(store)
    assert store(ATOMIC).complete(claim, RESPONSE, failure=failure)
    record = store(ATOMIC).read(claim.id)
    assert record.response == RESPONSE
    assert type(record.response.body) is type(record.fingerprint) is bytes
    assert (record.status, record.token) == ("failed" if failure else "completed", None)
    assert store(ATOMIC).claim(claim.operation, uuid4()).record.response == RESPONSE


def test_a_response_without_its_body_is_kept_so(store):
    claim = claimed(store)
    store(ATOMIC).complete(claim, StoredResponse(200, (), None))
    assert store(ATOMIC).read(claim.id).response == StoredResponse(200, (), None)


def test_retention_and_audit_count_from_the_response(store):
    policy = Policy(retention=100, audit_retention=500)
    claim = claimed(store, policy)
    shift(claim, expires_at=-timedelta(days=9), purge_at=-timedelta(days=9))
    store(policy).complete(claim, RESPONSE)
    record = IdempotencyRecord.objects.get()
    assert record.expires_at - record.updated_at == timedelta(seconds=100)
    assert record.purge_at - record.updated_at == timedelta(seconds=500)


@pytest.mark.parametrize("on_hold", [False, True])
def test_a_failure_leaves_its_reason(store, on_hold):
    claim = claimed(store)
    assert store(ATOMIC).fail(claim, "broke", on_hold=on_hold)
    record = store(ATOMIC).read(claim.id)
    assert (record.status, record.reason, record.on_hold, record.response) == ("failed", "broke", on_hold, None)


def test_a_released_key_is_as_if_never_used(store):
    claim = claimed(store)
    assert store(ATOMIC).release(claim)
    assert store(ATOMIC).read(claim.id) is None
    assert claimed(store).attempt == 1


def test_replays_are_added_to_what_was_counted(store):
    once, twice = claimed(store), claimed(store, key="other")
    store(ATOMIC).count_replays({once.id: 1, twice.id: 2})
    store(ATOMIC).count_replays({twice.id: 3, uuid4(): 9})
    counted = dict(IdempotencyRecord.objects.filter(last_replayed_at__isnull=False).values_list("id", "replays"))
    assert counted == {once.id: 1, twice.id: 5}


def test_headers_come_back_as_they_were_stored(store):
    claim = claimed(store)
    headers = (("X-Json", '{"a": "ü"}'), ("X-Empty", ""))
    store(ATOMIC).complete(claim, StoredResponse(200, headers, b""))
    assert store(ATOMIC).read(claim.id).response.headers == headers
