"""Child keys are derived in the admin, for those who may see what a record stores."""

from __future__ import annotations

import base64
import re

import pytest

from django_idempotency.engine import digests
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Operation
from tests.admin.pages import LIST, allow, claimed, page

OLD, NEW = (base64.b64encode(letter * 32).decode() for letter in (b"o", b"n"))


def url(key):
    return f"{LIST}{record_id('user:1', key)}/child-keys/"


def derived(client, key, name):
    response = client.get(url(key), {"name": name})
    assert response.status_code == 200
    return re.findall(r'class="idempotency-copyable"[^>]* value="([^"]+)"', response.content.decode())


def test_the_key_that_a_view_sends_is_derived_from_its_name(client, superuser, db):
    operation = claimed("k").operation
    assert derived(client, "k", "bank") == [digests.child_key(operation, "bank")]
    assert derived(client, "k", "bank") != derived(client, "k", "mail")
    assert 'href="' + url("k") in page(client, "k")


def test_under_a_digest_key_it_is_that_of_the_record(client, superuser, db, settings):
    settings.IDEMPOTENCY = {"DIGEST_KEYS": [OLD]}
    plain = Operation("user:1", "k", bytes(32), digest=bytes(32))
    operation = digests.keyed(plain)
    claimed("k")
    IdempotencyRecord.objects.update(fingerprint=operation.fingerprint)
    expected = digests.child_key(operation, "bank")
    settings.IDEMPOTENCY = {"DIGEST_KEYS": [NEW, OLD]}
    assert derived(client, "k", "bank") == [expected]
    settings.IDEMPOTENCY = {"DIGEST_KEYS": [NEW]}
    assert derived(client, "k", "bank") == []
    assert (
        "digest key that it was made with is not in the settings"
        in client.get(url("k"), {"name": "a"}).content.decode()
    )


def test_without_a_fingerprint_none_is_made_up(client, superuser, db):
    claimed("k")
    IdempotencyRecord.objects.update(fingerprint=b"")
    assert derived(client, "k", "bank") == []
    assert "fingerprint was erased" in client.get(url("k")).content.decode()


def test_only_the_permission_for_bodies_shows_them(client, staff, db):
    claimed("k")
    assert client.get(url("k"), {"name": "bank"}).status_code == 403
    assert url("k") not in page(client, "k")
    allow(staff, "view_response_idempotencyrecord")
    assert len(derived(client, "k", "bank")) == 1


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_an_invalid_name_derives_no_child_key(client, superuser, db, name):
    claimed("k")
    assert derived(client, "k", name) == []


@pytest.mark.parametrize("id", [str(record_id("user:1", "unknown")), "nonsense"])
def test_the_child_keys_of_an_unknown_record_are_not_found(client, superuser, db, id):
    assert client.get(f"{LIST}{id}/child-keys/").status_code == 404
