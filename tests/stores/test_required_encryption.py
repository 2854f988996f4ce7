"""``encrypt="require"`` without what encryption needs: nothing runs, and nothing is stored that could be guessed."""

from __future__ import annotations

import base64
import os
import sys

import pytest

from django_idempotency.messages import Consumer, Message
from django_idempotency.messages.message import StoreAway
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Body, Policy
from django_idempotency.reporting import logs
from tests.stores.test_privacy import card
from tests.support.callers import MODES, effects, entry_point, is_replay, pay
from tests.support.checks import found
from tests.support.views import code

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.cryptography]

WITH_KEY = {"ENCRYPTION_KEYS": [base64.b64encode(os.urandom(32)).decode()]}
ONLY_DIGESTS = {"DIGEST_KEYS": WITH_KEY["ENCRYPTION_KEYS"]}


@pytest.fixture(autouse=True)
def fresh_logs():
    logs._said.clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lost", "package", "reason"),
    [({}, True, "there is no key"), (ONLY_DIGESTS, True, "there is no key"), (WITH_KEY, False, "cryptography is not")],
    ids=["no key", "digest key only", "no package"],
)
def test_a_request_that_can_not_be_encrypted_is_refused_until_it_can(
    mode, lost, package, reason, settings, monkeypatch, caplog
):
    send = entry_point(card, mode=mode, body=Body(encrypt="require"))
    with monkeypatch.context() as without:
        settings.IDEMPOTENCY = lost | {"BODY": Body(encrypt="require")}
        if not package:
            without.setitem(sys.modules, "cryptography", None)
        refused = send()
        (message,) = found("E003")
    assert (refused.status_code, code(refused)) == (503, "idempotency_store_unavailable")
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
    assert reason in caplog.text
    assert reason in message.msg
    settings.IDEMPOTENCY = WITH_KEY
    first, second = send(), send()
    assert (first.status_code, is_replay(first), is_replay(second), effects()) == (201, False, True, 1)


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "batch"])
def test_messages_that_can_not_be_encrypted_stay_with_the_broker(together, settings):
    settings.IDEMPOTENCY = {}
    consumer = Consumer("receipts", lambda *_given: pay(), policy=Policy(body=Body(encrypt="require")))
    messages = [Message(source="receipts", id=id, body=b"4111 1111 1111 1111") for id in ("a", "b")]
    deliveries = consumer.consume_many(messages) if together else [*map(consumer.consume, messages)]
    assert [type(delivery) for delivery in deliveries] == [StoreAway] * 2
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
