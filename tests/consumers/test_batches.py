"""Messages that are handled together: each once, whatever becomes of the others."""

from __future__ import annotations

import pytest
from django.db import connection

from django_idempotency.consumers import (
    AlreadyDone,
    Consumer,
    Done,
    InFlightElsewhere,
    Malformed,
    Message,
    Refused,
    RejectMessage,
    Retry,
    RetryLater,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.consumers.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.statements import sent_statements
from tests.support.threads import in_threads, just_before

pytestmark = pytest.mark.usefixtures("transactional_db")


def messages(*ids):
    return [Message("queue", str(id), b"{}") for id in ids]


def kinds(deliveries):
    return [type(delivery) for delivery in deliveries]


def fussy(message, context):
    """Refuses "refused", and fails for "failing" once, each after its effect."""
    paid = pay(message, context)
    if message.id == "refused":
        raise RejectMessage("no")
    if message.id == "failing" and context.attempt == 1:
        raise LookupError("not yet")
    return paid


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_each_of_many_is_handled_once_and_in_order(mode):
    consumer = Consumer("c", pay, policy=Policy(mode=mode))
    assert kinds(consumer.consume_many(messages(*range(20)))) == [Done] * 20
    assert kinds(consumer.consume_many(messages(*range(10, 30)))) == [AlreadyDone] * 10 + [Done] * 10
    references = LedgerEntry.objects.order_by("created_at").values_list("reference", flat=True)
    assert list(references) == [str(number) for number in range(30)]


def test_one_that_fails_or_is_refused_undoes_its_own_effect_alone():
    consumer = Consumer("c", fussy)
    deliveries = consumer.consume_many(messages("a", "failing", "b", "refused", "c"))
    assert kinds(deliveries) == [Done, Retry, Done, Refused, Done]
    assert sorted(LedgerEntry.objects.values_list("reference", flat=True)) == ["a", "b", "c"]
    again = consumer.consume_many(messages("a", "failing", "refused"))
    assert kinds(again) == [AlreadyDone, Done, Refused]
    assert effects() == 4


def test_one_id_twice_in_a_batch_is_a_duplicate():
    assert kinds(Consumer("c", pay).consume_many(messages("a", "b", "a"))) == [Done, Done, AlreadyDone]
    assert effects() == 2


def test_one_that_can_not_be_told_apart_is_malformed():
    deliveries = Consumer("c", pay).consume_many([*messages("a"), Message("queue", ""), *messages("b")])
    assert kinds(deliveries) == [Done, Malformed, Done]


def test_no_messages_are_no_deliveries():
    assert Consumer("c", pay).consume_many([]) == []


@pytest.mark.postgresql
def test_a_batch_claims_and_completes_in_five_statements():
    consumer = Consumer("c", lambda message, context: None)
    consumer.consume_many(messages(*range(3)))
    with sent_statements() as statements:
        consumer.consume_many(messages(*range(10, 60)))
    on_records = [s for s in statements.all if "django_idempotency" in s]
    assert len(on_records) == 3
    assert len([s for s in statements.transaction if not s.startswith(("SAVEPOINT", "RELEASE"))]) == 2
    with sent_statements() as statements:
        consumer.consume_many(messages(*range(10, 60)))
    assert len(statements.all) == 1


@pytest.mark.row_locks
def test_batches_in_different_orders_never_deadlock():
    consumer = Consumer("c", pay)
    consumer.consume_many(messages("warm", "up"))

    def work(index):
        deliveries = []
        for first in range(0, 200, 20):
            ids = list(range(first, first + 20))
            deliveries += consumer.consume_many(messages(*(ids if index % 2 else reversed(ids))))
        return deliveries

    results = in_threads(4, work)
    flat = [delivery for deliveries in results for delivery in deliveries]
    assert kinds(flat).count(Done) == 200
    assert set(kinds(flat)) <= {Done, AlreadyDone, InFlightElsewhere}
    assert LedgerEntry.objects.values("reference").distinct().count() == effects() == 202


@pytest.mark.row_locks
def test_one_that_is_in_flight_elsewhere_keeps_nobody_waiting(other_thread):
    consumer = Consumer("c", pay)

    def handle(message, context):
        meanwhile.extend(other_thread(consumer.consume_many, messages("a", "b", "c")))
        return pay(message, context)

    meanwhile = []
    assert isinstance(Consumer("c", handle).consume(messages("b")[0]), Done)
    assert kinds(meanwhile) == [Done, InFlightElsewhere, Done]
    assert effects() == 3


@pytest.mark.postgresql
def test_a_commit_that_fails_leaves_the_others_to_themselves():
    """A deferred constraint: nobody knows which of them it was."""

    def handle(message, context):
        paid = pay(message, context)
        if message.id == "bad":
            LedgerEntry.objects.bulk_create([LedgerEntry(user_id=0, amount=0, reference="nobody")])
        return paid

    deliveries = Consumer("c", handle).consume_many(messages("a", "bad", "b"))
    assert kinds(deliveries) == [Done, Retry, Done]
    assert sorted(LedgerEntry.objects.values_list("reference", flat=True)) == ["a", "b"]


@pytest.mark.postgresql
def test_a_connection_that_breaks_in_a_batch_loses_nothing():
    consumer = Consumer("c", pay)

    def cut():
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
            killed.append(cursor.fetchone())
        other.close()

    killed = []
    ids = messages("a", "b", "c")
    with just_before(r"INSERT INTO \"testproject_ledgerentry\"", cut):
        first = consumer.consume_many(ids)
    again = [delivery if not isinstance(delivery, RetryLater) else consumer.consume(message)
             for message, delivery in zip(ids, first, strict=True)]  # fmt: skip
    assert killed == [(True,)]
    assert set(kinds(again)) <= {Done, AlreadyDone}
    assert effects() == 3


def test_a_crash_in_a_batch_leaves_the_rest_for_redelivery():
    class Killed(BaseException):
        pass

    def die(message, context):
        pay(message, context)
        if message.id == "b" and context.attempt == 1:
            raise Killed

    consumer = Consumer("c", die, policy=Policy(takeover_grace=0))
    with pytest.raises(Killed):
        consumer.consume_many(messages("a", "b", "c"))
    assert effects() == 0
    assert kinds(consumer.consume_many(messages("a", "b", "c"))) == [Done] * 3
    assert set(IdempotencyRecord.objects.values_list("attempts", flat=True)) == {2}
