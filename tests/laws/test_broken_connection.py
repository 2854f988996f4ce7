"""L3, L12: a connection that an exception of a signal's left half inside a transaction
is discarded.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from django.db import connection, connections, transaction

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.messages import Ack, Message, consume
from django_idempotency.stores.transactions import Transaction
from django_idempotency.values.exceptions import ClaimInsideTransaction
from django_idempotency.values.policy import Policy
from tests.support.callers import MODES, effects, entry_point, operation, pay, paying
from tests.support.databases import environment
from tests.support.requirements import ROOT

pytestmark = pytest.mark.usefixtures("payer")


class Interrupted(Exception):
    """As Celery's ``SoftTimeLimitExceeded``."""


def interrupt(*_args, **_named):
    raise Interrupted


def in_enter_before_the_block_is_noted(monkeypatch):
    """``Atomic.__enter__`` notes the block last."""
    with monkeypatch.context() as patch, contextlib.suppress(Interrupted):
        connection.ensure_connection()
        blocks = type("Blocks", (list,), {"append": interrupt})()
        patch.setattr(connections["default"], "atomic_blocks", blocks)
        transaction.atomic().__enter__()
    pay("half")


def in_the_exit_of_an_inner_block(monkeypatch):
    """Between the two lists that ``Atomic.__exit__`` takes from, so that the outer
    leaves in its place.
    """
    with contextlib.suppress(Interrupted), transaction.atomic(), transaction.atomic():
        pay("half")
        connection.atomic_blocks.pop()
        connection.atomic_blocks.append(connection.atomic_blocks[0])
        connection.savepoint_ids.append(connection.savepoint_ids[0])
        raise Interrupted


def between_the_begin_of_a_transaction_and_its_end(monkeypatch):
    """Before there is a try statement to end it."""
    Transaction("default").begin()
    pay("half")


def between_the_begin_of_a_run_and_its_end(monkeypatch):
    """As between the two calls of an entry point."""
    assert isinstance(engine.begin(operation("left"), resolve(Policy())), engine.Run)
    pay("half")


def in_a_batch(monkeypatch):
    claims = engine.claim_many([operation("left")], resolve(Policy()))
    engine.Batch(claims, resolve(Policy())).begin()
    pay("half")


def closed_meanwhile(monkeypatch):
    """As by Celery between two tasks, when the connection still claims to be in a
    block.
    """
    in_enter_before_the_block_is_noted(monkeypatch)
    connection.close()


def between_the_drivers_note_and_djangos(monkeypatch):
    """As in ``set_autocommit()``, at the beginning of a block."""
    connection.ensure_connection()
    connection._set_autocommit(False)
    pay("half")


IN_A_BLOCK = (
    in_enter_before_the_block_is_noted,
    in_the_exit_of_an_inner_block,
    between_the_begin_of_a_transaction_and_its_end,
    between_the_begin_of_a_run_and_its_end,
    in_a_batch,
    closed_meanwhile,
)
ON_POSTGRESQL = {in_a_batch: pytest.mark.postgresql}
LEFT = [
    pytest.param(act, id=act.__name__, marks=ON_POSTGRESQL.get(act, ()))
    for act in IN_A_BLOCK
]
# On SQLite it can't be told from a transaction that was begun by hand.
LEFT.append(
    pytest.param(
        between_the_drivers_note_and_djangos,
        id="out_of_step",
        marks=pytest.mark.row_locks,
    )
)


@pytest.fixture(params=LEFT)
def half_inside(request, monkeypatch):
    request.param(monkeypatch)
    assert connection.in_atomic_block == (request.param in IN_A_BLOCK)
    yield
    connection.in_atomic_block = connection.closed_in_transaction = False
    connection.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_gets_a_sound_connection(half_inside, mode, other_thread):
    assert entry_point(paying, mode=mode)().status_code == 201
    assert other_thread(effects) == 1, "committed, and nothing of what was half done"
    assert other_thread(effects, "half") == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_message_is_not_acknowledged_for_what_did_not_commit(
    half_inside, mode, other_thread
):
    delivery = consume(
        Message("q", "1"),
        lambda message, context: str(pay().id),
        policy=Policy(mode=mode),
    )
    assert isinstance(delivery, Ack)
    assert other_thread(effects) == 1


def test_a_block_that_somebody_can_still_leave_is_left_alone():
    with transaction.atomic():
        pay("kept")
        with pytest.raises(ClaimInsideTransaction, match="outside the transaction"):
            entry_point(paying)()
    with contextlib.ExitStack() as stack:
        stack.enter_context(transaction.atomic())
        with pytest.raises(ClaimInsideTransaction):
            entry_point(paying)()
    assert effects("kept") == 1


def test_a_transaction_that_is_managed_by_hand_is_left_alone():
    connection.set_autocommit(False)
    try:
        pay("kept")
        with pytest.raises(ClaimInsideTransaction):
            entry_point(paying)()
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert effects("kept") == 1


@pytest.mark.row_locks
@pytest.mark.interruptions
@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        ("message", "record"),
        ("request", "record"),
        pytest.param(
            "message",
            "lock",
            marks=[pytest.mark.postgresql, pytest.mark.not_on_citus],
        ),
    ],
)
def test_a_worker_interrupted_at_random_moments_goes_on(kind, claim):
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interrupted_process", kind],
        cwd=ROOT,
        env=environment() | {"CLAIM": claim},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    done, interrupted, refused = map(int, run.stdout.split())
    assert interrupted >= 20
    assert done >= 20
    assert refused == 0
