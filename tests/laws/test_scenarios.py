"""The scenarios by which the literature tells a sound implementation; crashes and
mismatches are in test_laws_http.
"""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

from django_idempotency.messages import AlreadyDone, Done, Message, consume
from django_idempotency.values.policy import Policy
from tests.support.callers import BODY, MODES, SCOPE, effects, payment
from tests.support.owner_process import AFTER_EFFECT, holding
from tests.support.threads import in_threads
from tests.support.waiting import eventually

over_http = pytest.mark.server
row_locks = pytest.mark.row_locks

PATH = "/api/charges/"


def charge(server, reference, **options):
    return server.post(PATH, payment(reference), key=reference, **options)


def charge_and_hang_up(server, reference, simulate):
    """The client sends all of it, and is gone before the answer."""
    headers = (f'Idempotency-Key: "{reference}"', f"X-Simulate: {json.dumps(simulate)}")
    with server.sent(
        PATH, json.dumps(payment(reference)).encode(), *map(str.encode, headers)
    ):
        pass


@over_http
def test_retry_after_a_lost_response_is_replayed(server, reference):
    charge_and_hang_up(server, reference, simulate={"delay_ms": 50})
    eventually(lambda: server.ledger(reference))
    retried = charge(server, reference)
    assert (retried.status_code, retried.headers["Idempotent-Replayed"]) == (
        201,
        "true",
    )
    assert retried.json()["amount"] == 5
    assert server.ledger(reference) == 1


@over_http
@row_locks
def test_two_at_once_409_for_the_second(server):
    answers, reference = eventually(lambda: at_once(server, uuid4().hex))
    first, second = sorted(answers, key=lambda answer: answer.status_code)
    assert (first.status_code, second.status_code) == (201, 409)
    assert second.headers["Retry-After"] in ("1", "2")
    assert (second.json()["code"], second.json()["retryable"]) == (
        "idempotency_key_in_use",
        True,
    )
    assert server.ledger(reference) == 1


def at_once(server, reference):
    """Two answers to requests that overlapped; a replay shows that on this occasion
    they did not.
    """
    answers = in_threads(
        2, lambda _: charge(server, reference, simulate={"delay_ms": 300})
    )
    overlapped = not any("Idempotent-Replayed" in answer.headers for answer in answers)
    return (answers, reference) if overlapped else None


@over_http
def test_retry_of_a_terminal_failure_gets_the_stored_error(server, reference):
    declined = charge(server, reference, simulate={"status": 402})
    retried = charge(server, reference)
    assert (declined.status_code, retried.status_code) == (402, 402)
    assert retried.content == declined.content
    assert retried.headers["Idempotent-Replayed"] == "true"


@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("mode", MODES)
def test_message_redelivered_after_completion_is_acknowledged(mode):
    with holding("message", mode=mode) as consumer:
        consumer.go_on()
        assert consumer.says() == AFTER_EFFECT
        consumer.go_on()
        handled, result = consumer.says()
        consumer.kill()  # before it could acknowledge
    assert handled == "Done"
    assert consume(
        Message(SCOPE, "k", BODY), never, policy=Policy(mode=mode)
    ) == AlreadyDone(result)
    assert effects() == 1


@row_locks
@pytest.mark.usefixtures("payer")
def test_message_redelivered_after_a_handler_crash_is_handled():
    with holding("message") as consumer:
        consumer.go_on()
        assert consumer.says() == AFTER_EFFECT
        consumer.kill()
    assert effects() == 0
    redelivered = eventually(
        lambda: acknowledged(consume(Message(SCOPE, "k", BODY), lambda *_: "handled"))
    )
    assert redelivered == Done("handled")


def never(message, context):
    raise AssertionError("it was handled again")


def acknowledged(delivery):
    return delivery if isinstance(delivery, Done) else None
