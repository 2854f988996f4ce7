"""Messages that are handled together: each once, whatever becomes of the others. What
one costs in statements.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import partial
from uuid import uuid4

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from django_idempotency.messages import (
    Ack,
    AlreadyDone,
    Consumer,
    Done,
    InFlightElsewhere,
    Message,
    OutOfTurn,
    Refused,
    RejectMessage,
    Retry,
    RetryLater,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import pipeline
from django_idempotency.stores.claim_function import MEET
from django_idempotency.values.keys import record_id
from django_idempotency.values.policy import Atomic, Policy
from testproject.models import LedgerEntry
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects
from tests.support.callers import references
from tests.support.databases import environment
from tests.support.servers import ROOT
from tests.support.sql import run_sql
from tests.support.statements import sent_statements
from tests.support.threads import in_threads, just_before
from tests.support.waiting import wait_for_row_locks

pytestmark = [pytest.mark.usefixtures("transactional_db"), pytest.mark.postgresql]


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
    assert (
        kinds(consumer.consume_many(messages(*range(10, 30))))
        == [AlreadyDone] * 10 + [Done] * 10
    )
    assert references() == [str(number) for number in range(30)]


def test_a_message_that_fails_or_is_refused_undoes_its_own_effect_alone():
    consumer = Consumer("c", fussy)
    deliveries = consumer.consume_many(messages("a", "failing", "b", "refused", "c"))
    assert kinds(deliveries) == [Done, Retry, Done, Refused, Done]
    assert sorted(references()) == [
        "a",
        "b",
        "c",
    ]
    again = consumer.consume_many(messages("a", "failing", "refused"))
    assert kinds(again) == [AlreadyDone, Done, Refused]
    assert effects() == 4


def swallow_an_integrity_error(message):
    with suppress(IntegrityError):
        LedgerEntry.objects.get(reference=message.id).save(force_insert=True)


def swallow_an_error_of_the_cursor(message):
    with suppress(DatabaseError):
        run_sql("SELECT nothing FROM nowhere")


ONLY_IT, ALL = ["a", "spoilt", "b", "spoilt"], ["a", "spoilt", "a", "spoilt", "b"]


@pytest.mark.parametrize(
    ("spoil", "handled"),
    [
        (swallow_an_integrity_error, ONLY_IT),
        (swallow_an_error_of_the_cursor, ONLY_IT),
        (lambda message: transaction.set_rollback(True), ONLY_IT),
        (lambda message: connection.close(), ALL),
    ],
    ids=[
        "integrity error",
        "error of the cursor",
        "marked for rollback",
        "connection closed",
    ],
)
def test_a_message_that_spoils_its_transaction_is_not_done(spoil, handled):
    """Nothing of it can be committed, so it is tried again, and the others are done.

    What the others do outside of the database can't be undone, so they are not handled
    again without need.
    """
    seen = []

    def handle(message, context):
        seen.append(message.id)
        paid = pay(message, context)
        if message.id == "spoilt":
            spoil(message)
        return paid

    assert kinds(Consumer("c", handle).consume_many(messages("a", "spoilt", "b"))) == [
        Done,
        Retry,
        Done,
    ]
    assert seen == handled
    assert sorted(references()) == ["a", "b"]
    assert kinds(Consumer("c", pay).consume_many(messages("a", "spoilt", "b"))) == [
        AlreadyDone,
        Done,
        AlreadyDone,
    ]


class Interrupted(Exception):
    """As Celery's ``SoftTimeLimitExceeded``."""


@pytest.fixture
def interrupting(monkeypatch):
    """``interrupting(error)``: raised once, in place of the rollback to a savepoint."""

    def interrupt(error):
        def interrupted(sql, *details):
            if sql.startswith("ROLLBACK TO") and errors:
                raise errors.pop()
            return execute(sql, *details)

        errors, execute = [error], pipeline.execute
        monkeypatch.setattr(pipeline, "execute", interrupted)
        return errors

    return interrupt


def test_an_effect_whose_rollback_is_interrupted_is_not_committed_with_the_others(
    interrupting,
):
    left = interrupting(Interrupted())
    assert kinds(Consumer("c", fussy).consume_many(messages("a", "failing", "b"))) == [
        Done,
        Retry,
        Done,
    ]
    assert not left
    assert sorted(references()) == ["a", "b"]


def test_a_process_that_ends_in_a_rollback_stops_handling_messages(interrupting):
    interrupting(SystemExit())
    with pytest.raises(SystemExit):
        Consumer("c", fussy).consume_many(messages("a", "failing", "b"))
    assert effects() == 0


def test_hooks_of_one_that_fails_do_not_run():
    committed = []

    def handle(message, context):
        transaction.on_commit(partial(committed.append, message.id))
        with transaction.atomic():
            transaction.on_commit(partial(committed.append, f"inner {message.id}"))
        return fussy(message, context)

    Consumer("c", handle).consume_many(messages("a", "failing", "b"))
    assert committed == ["a", "inner a", "b", "inner b"]


def test_an_id_twice_in_a_batch_is_a_duplicate():
    assert kinds(Consumer("c", pay).consume_many(messages("a", "b", "a"))) == [
        Done,
        Done,
        AlreadyDone,
    ]
    assert effects() == 2


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_in_order_none_passes_one_that_is_to_come_again(mode):
    consumer = Consumer("c", fussy, policy=Policy(mode=mode))
    lane = messages("a", "refused", "failing", "b", "b", "c")
    first = consumer.consume_many(lane, in_order=True)
    assert kinds(first) == [Done, Refused, Retry, OutOfTurn, OutOfTurn, OutOfTurn]
    assert set(IdempotencyRecord.objects.values_list("key", flat=True)) == {
        "a",
        "refused",
        "failing",
    }
    assert kinds(consumer.consume_many(lane[2:], in_order=True)) == [
        Done,
        Done,
        AlreadyDone,
        Done,
    ]
    paid = references()
    assert [id for id in paid if id not in ("refused", "failing")] == ["a", "b", "c"]
    assert paid.index("failing") < paid.index("b")


def test_a_batch_claims_and_completes_in_five_statements():
    consumer = Consumer("c", lambda message, context: None)
    consumer.consume_many(messages(*range(3)))
    with sent_statements() as statements:
        consumer.consume_many(messages(*range(10, 60)))
    on_records = [
        s for s in statements.all if "django_idempotency" in s and "SAVEPOINT" not in s
    ]
    assert len(on_records) == 3
    assert len([s for s in statements.transaction if "SAVEPOINT" not in s]) == 2
    savepoints = [
        together for together in statements.round_trips if "SAVEPOINT" in together[0]
    ]
    assert len(savepoints) == 50  # one begins where the last one ends
    with sent_statements() as statements:
        consumer.consume_many(messages(*range(10, 60)))
    assert len(statements.all) == 1


def test_batches_in_different_orders_never_deadlock():
    consumer = Consumer("c", pay)
    consumer.consume_many(messages("warm", "up"))

    def work(index):
        deliveries = []
        for first in range(0, 200, 20):
            ids = list(range(first, first + 20))
            deliveries += consumer.consume_many(
                messages(*(ids if index % 2 else reversed(ids)))
            )
        return deliveries

    results = in_threads(4, work)
    flat = [delivery for deliveries in results for delivery in deliveries]
    assert kinds(flat).count(Done) == 200
    assert set(kinds(flat)) <= {Done, AlreadyDone, InFlightElsewhere}
    assert (
        LedgerEntry.objects.values("reference").distinct().count() == effects() == 202
    )


@pytest.mark.parametrize(
    ("in_order", "last"), [(False, Done), (True, OutOfTurn)], ids=["", "in order"]
)
def test_a_message_in_flight_elsewhere_is_passed_unless_all_go_in_order(
    other_thread, in_order, last
):
    consumer = Consumer("c", pay)

    def handle(message, context):
        meanwhile.extend(
            other_thread(
                consumer.consume_many, messages("a", "b", "c"), in_order=in_order
            )
        )
        return pay(message, context)

    meanwhile = []
    assert isinstance(Consumer("c", handle).consume(messages("b")[0]), Done)
    assert kinds(meanwhile) == [Done, InFlightElsewhere, last]
    assert effects() == (2 if in_order else 3)


def test_a_commit_that_fails_leaves_the_others_to_themselves():
    """A deferred constraint: nobody knows which of them it was."""

    def handle(message, context):
        paid = pay(message, context)
        if message.id == "bad":
            LedgerEntry.objects.bulk_create(
                [LedgerEntry(user_id=0, amount=0, reference="nobody")]
            )
        return paid

    deliveries = Consumer("c", handle).consume_many(messages("a", "bad", "b"))
    assert kinds(deliveries) == [Done, Retry, Done]
    assert sorted(references()) == ["a", "b"]


def test_a_batch_that_has_lost_a_claim_commits_nothing():
    """COMMIT goes to the server with the completion, which must fail then."""

    def handle(message, context):
        tokens.append(context.claim.token)
        if message.id == "b" and len(tokens) == 2:
            IdempotencyRecord.objects.filter(token=tokens[0]).update(token=uuid4())
        return pay(message, context)

    tokens = []
    assert kinds(Consumer("c", handle).consume_many(messages("a", "b"))) == [Done, Done]
    assert len(tokens) == 4, "each ran alone again"
    assert (
        effects(),
        IdempotencyRecord.objects.filter(status="completed").count(),
    ) == (2, 2)


def test_a_connection_that_breaks_in_a_batch_loses_nothing():
    consumer = Consumer("c", pay)

    def cut():
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(%s, 60000)",
                [connection.connection.info.backend_pid],
            )
            killed.append(cursor.fetchone())
        other.close()

    killed = []
    ids = messages("a", "b", "c")
    with just_before(r"INSERT INTO \"testproject_ledgerentry\"", cut):
        first = consumer.consume_many(ids)
    again = [
        consumer.consume(message) if isinstance(delivery, RetryLater) else delivery
        for message, delivery in zip(ids, first, strict=True)
    ]
    assert killed == [(True,)]
    assert set(kinds(again)) <= {Done, AlreadyDone}
    assert effects() == 3


def test_a_batch_goes_on_after_claims_by_lock_that_end_meanwhile():
    """Where each message then claimed by itself, all at once, the second one met the
    first one's transaction.
    """
    consumer = Consumer("c", pay, policy=Policy(mode=Atomic(claim="lock")))
    batch = messages("a", "b", "c")
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        for message in batch[:2]:
            id = record_id(f"consumer:c:{message.source}", message.id)
            cursor.execute(MEET, [1, id, id])
        with just_before(
            r".*pg_try_advisory_xact_lock\(", lambda: cursor.execute("ROLLBACK")
        ):
            deliveries = consumer.consume_many(batch)
    other.close()
    assert kinds(deliveries) == [Done] * 3
    assert effects() == 3


POISONED = """
import django, os
django.setup()
from django_idempotency.messages import Consumer, Message
from django_idempotency.values.policy import Atomic, Policy
from tests.messages.handlers import pay

def handle(message, context):
    return os.kill(os.getpid(), 9) if message.id == "poison" else pay(message, context)

policy = Policy(mode=Atomic(takeover_grace=0))
consumer = Consumer("c", handle, max_attempts=2, policy=policy)
batch = [Message("queue", id, b"{}") for id in ("before", "poison", "behind")]
print(*(type(delivery).__name__ for delivery in consumer.consume_many(batch)))
"""


def test_a_message_that_ends_its_process_leaves_the_others_alone():
    """The others are claimed with it once; after that only what begins to run is an
    attempt.
    """
    command, runs = [sys.executable, "-c", POISONED], []
    for _time in range(3):
        runs.append(
            subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True
            )
        )
        wait_for_row_locks()
    assert [run.stdout for run in runs] == [
        "",
        "",
        "AlreadyDone Exhausted Done\n",
    ], runs[-1].stderr
    assert effects() == 2


@pytest.mark.parametrize("ids", [("a", "bad"), ("a", "bad", "b")])
@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
def test_effects_survive_a_handler_that_ends_the_transaction_itself(ids, statement):
    def handle(message, context):
        paid = pay(message, context)
        if message.id == "bad":
            run_sql(statement)
        return paid

    told = Consumer("c", handle).consume_many(messages(*ids))
    done = {
        id for id, delivery in zip(ids, told, strict=True) if isinstance(delivery, Ack)
    }
    there = sorted(references())
    assert "a" in done <= set(there)
    assert there == sorted(set(there)), "each once"


def test_the_hooks_after_one_that_raises_still_run(caplog):
    ran = []

    def fail():
        raise LookupError("hook")

    def handle(message, context):
        transaction.on_commit(
            fail if message.id == "b" else partial(ran.append, message.id)
        )
        return pay(message, context)

    assert (
        kinds(Consumer("c", handle).consume_many(messages("a", "b", "c"))) == [Done] * 3
    )
    assert ran == ["a", "c"]
    assert "hook" in caplog.text


def test_a_message_takes_three_round_trips_and_a_duplicate_one():
    """Claim; lock with BEGIN; complete with COMMIT."""
    first, duplicate = statements_of(Policy())
    assert (len(first.round_trips), len(duplicate.round_trips)) == (3, 1)
    assert [len(together) for together in first.round_trips] == [1, 2, 2]


def test_a_message_by_lock_takes_two_round_trips():
    """Claim with BEGIN; insert with COMMIT. A duplicate begins and ends a transaction
    to find out.
    """
    first, duplicate = statements_of(Policy(mode=Atomic(claim="lock")))
    assert [together[0] for together in first.round_trips] == ["BEGIN", first.all[3]]
    assert (len(first.round_trips), len(duplicate.round_trips)) == (2, 2)


def statements_of(policy):
    """What a first delivery sends, and a duplicate."""
    consumer = Consumer("c", lambda message, context: None, policy=policy)
    for number in range(8):  # until they are prepared
        consumer.consume(Message("queue", f"warm-{number}"))
    with sent_statements() as first:
        assert isinstance(consumer.consume(MESSAGE), Done)
    with sent_statements() as second:
        assert isinstance(consumer.consume(MESSAGE), AlreadyDone)
    return first, second
