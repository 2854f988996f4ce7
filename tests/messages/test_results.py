"""Which messages are the same, and what a redelivery gets: what the first delivery
got.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from uuid import UUID

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import strategies as some

from django_idempotency.maintenance import decisions
from django_idempotency.messages import (
    NOT_KEPT,
    AlreadyDone,
    Consumer,
    Done,
    Malformed,
    MarkedFailed,
    Message,
    Refused,
    consume,
)
from django_idempotency.messages.message import identified
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.policy import Body, Policy
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects
from tests.support.properties import given

RESULTS = [None, True, 7, 1.5, "text", [], {}, {"a": [1, {"b": None}]}]


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_replay_has_the_first_result(result):
    told = [consume(MESSAGE, lambda *given: result) for _delivery in range(2)]
    assert told == [Done(result), AlreadyDone(result)]


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize(
    "result",
    [Decimal("1.10"), {"paid": date(2026, 1, 2)}, (1, 2), {1: "one"}],
    ids=repr,
)
def test_a_result_that_json_would_change_is_refused_before_commit(result):
    assert "JSON" in consume(MESSAGE, lambda *given: [pay(*given), result]).reason
    assert effects() == 0
    assert consume(MESSAGE, pay) == Done({"paid": 5, "attempt": 2})


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize(
    "policy",
    [Policy(body=Body(limit=10)), Policy(body=Body(store=False))],
    ids=["large", "by policy"],
)
def test_a_result_that_is_not_kept_is_marked_as_such(policy):
    consume(MESSAGE, pay, policy=policy)
    assert consume(MESSAGE, pay, policy=policy) == AlreadyDone(NOT_KEPT)
    assert effects() == 1


@pytest.mark.usefixtures("transactional_db")
def test_a_result_of_exactly_the_limit_is_kept():
    policy = Policy(body=Body(limit=6))
    assert [
        consume(MESSAGE, lambda *given: "four", policy=policy).result for _ in range(2)
    ] == ["four"] * 2


@pytest.mark.usefixtures("transactional_db")
def test_lease_mode_completes_without_a_storable_result():
    """Its effects have happened: they may not happen at every delivery."""
    policy = Policy(mode="lease")
    assert isinstance(
        consume(MESSAGE, lambda *given: [pay(*given), object()], policy=policy), Done
    )
    assert consume(MESSAGE, pay, policy=policy) == AlreadyDone(NOT_KEPT)
    assert effects() == 1


@pytest.fixture
def failed(transactional_db):
    """The id of a record whose handler failed, with no answer yet."""

    def crash(message, context):
        raise LookupError("not yet")

    consume(MESSAGE, crash)
    return IdempotencyRecord.objects.get().pk


def test_a_message_that_an_operator_failed_is_reported_as_failed(failed):
    assert not isinstance(
        decisions.fail(failed, detail="never paid"), decisions.Refusal
    )
    assert consume(MESSAGE, pay) == MarkedFailed("never paid")
    assert effects() == 0


@pytest.mark.parametrize(
    ("body", "kind", "result"),
    [
        (b"", "application/json", None),
        (b"paid by hand", "text/plain", "paid by hand"),
        (b'{"paid": 5}', "application/json", {"paid": 5}),
        (b"{", "application/json", NOT_KEPT),
        (b"\xff", "text/plain", NOT_KEPT),
    ],
)
def test_a_message_that_an_operator_resolved_has_that_result(
    failed, body, kind, result
):
    decisions.resolve(failed, StoredResponse(200, (("Content-Type", kind),), body))
    assert consume(MESSAGE, pay) == AlreadyDone(result)


@pytest.mark.parametrize(
    "body", [b"", b"no", b'"no"', b'{"detail": "no"}', b"\xff", b"[]"]
)
def test_the_reason_of_a_stored_failure_is_text(failed, body):
    decisions.resolve(
        failed, StoredResponse(422, (("Content-Type", "application/json"),), body)
    )
    delivery = consume(MESSAGE, pay)
    assert isinstance(delivery, Refused)
    assert isinstance(delivery.reason, str)
    assert delivery.reason


@pytest.mark.usefixtures("transactional_db")
def test_a_body_that_is_not_utf_8_is_compared_by_its_bytes():
    message = Message("queue", "1", b"\xff\x00")
    assert isinstance(consume(message, pay), Done)
    assert isinstance(consume(message, pay), AlreadyDone)


def key(id, source="queue"):
    return identified(Message(source, id)).id


PLAIN = [
    "a",
    "x" * 255,
    "8e03978e-40d5-43e8-bc93-6894a57f9324",
    "topic-7-1234",
    "a~sha256:b",
]
TEXTS = [(7, "7"), (UUID(int=7), str(UUID(int=7))), (b"seven", "seven")]


@pytest.mark.parametrize(("id", "text"), [*zip(PLAIN, PLAIN, strict=True), *TEXTS])
def test_an_id_that_can_be_stored_is_its_own_key(id, text):
    assert key(id) == text


@pytest.mark.parametrize(
    "id", ["x" * 256, "a\0b", "a b", "ü", "\udcff", "line\n", b"\xff"]
)
def test_other_ids_are_hashed_behind_what_is_readable(id):
    hashed = key(id)
    assert len(hashed) <= 255
    assert hashed.isascii()
    assert hashed.isprintable()
    assert "~sha256:" in hashed
    assert hashed[0] in "xa_l"


@given(some.text(min_size=1), some.text(min_size=1), examples=100)
def test_different_ids_are_different_keys(one, other):
    assert (key(one) == key(other)) == (one == other)


def test_an_id_that_looks_hashed_is_hashed_again():
    assert key(key("ü")) != key("ü")


@pytest.mark.parametrize("id", [None, "", b"", True, 1.5, object(), ["a"]])
@pytest.mark.usefixtures("transactional_db")
def test_a_message_without_a_usable_id_is_rejected_with_a_reason(id):
    delivery = consume(Message("queue", id), pay)
    assert isinstance(delivery, Malformed)
    assert delivery.reason.startswith("its id is")
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.parametrize("body", [None, "text", {"a": 1}, 7])
@pytest.mark.usefixtures("transactional_db")
def test_a_body_that_is_not_bytes_is_rejected_with_a_reason(body):
    delivery = consume(Message("queue", "1", body), pay)
    assert delivery == Malformed(
        f"its body is of type {type(body).__name__}; it must be bytes"
    )


@pytest.mark.usefixtures("transactional_db")
def test_two_consumers_of_a_queue_each_handle_a_message():
    first, second = Consumer("receipts", pay), Consumer("statistics", pay)
    assert isinstance(first.consume(MESSAGE), Done)
    assert isinstance(second.consume(MESSAGE), Done)
    assert isinstance(second.consume(MESSAGE), AlreadyDone)
    assert effects() == 2


@pytest.mark.parametrize("name", ["", "a:b", "a b", "ü", "x" * 101, None])
def test_a_consumer_needs_a_plain_name(name):
    with pytest.raises((ImproperlyConfigured, TypeError)):
        Consumer(name, pay)


@pytest.mark.usefixtures("transactional_db")
def test_the_key_is_made_of_consumer_source_and_id():
    consume(MESSAGE, pay, consumer="receipts")
    record = IdempotencyRecord.objects.get()
    assert (record.scope, record.key) == ("consumer:receipts:payments", "id-1")


@pytest.mark.usefixtures("transactional_db")
def test_a_message_may_have_no_headers():
    message = Message("queue", "1", b"{}", None)
    assert message.headers == {}
    assert isinstance(consume(message, pay), Done)
