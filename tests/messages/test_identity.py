"""What tells messages apart, whatever a broker takes for an id."""

from __future__ import annotations

from uuid import UUID

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as some

from django_idempotency.messages import AlreadyDone, Consumer, Done, Malformed, Message, consume
from django_idempotency.messages.message import identified
from django_idempotency.models import IdempotencyRecord
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects


def key(id, source="queue"):
    return identified(Message(source, id)).id


@pytest.mark.parametrize("id", ["a", "x" * 255, "8e03978e-40d5-43e8-bc93-6894a57f9324", "topic-7-1234", "a~sha256:b"])
def test_an_id_that_can_be_stored_is_its_own_key(id):
    assert key(id) == id


@pytest.mark.parametrize(("id", "text"), [(7, "7"), (UUID(int=7), str(UUID(int=7))), (b"seven", "seven")])
def test_numbers_uuids_and_bytes_stand_for_their_text(id, text):
    assert key(id) == text


@pytest.mark.parametrize("id", ["x" * 256, "a\0b", "a b", "ü", "\udcff", "line\n", b"\xff"])
def test_other_ids_are_hashed_behind_what_is_readable(id):
    hashed = key(id)
    assert len(hashed) <= 255
    assert hashed.isascii()
    assert hashed.isprintable()
    assert "~sha256:" in hashed
    assert hashed[0] in "xa_l"


@given(some.text(min_size=1), some.text(min_size=1))
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
    assert delivery == Malformed(f"its body is of type {type(body).__name__}; it must be bytes")


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
