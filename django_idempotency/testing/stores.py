"""The contract of a store, as tests that every store runs, including those of third parties.

    class TestMyStore(StoreContract):
        alias = "mine"  # in STORES, in the settings of the test run

pytest collects the class; with unittest, inherit from ``TransactionTestCase`` too. A store in a database needs real
commits (``transactional_db``). The tests use keys of their own and clean nothing up.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

from django.db import connections

from django_idempotency import engine
from django_idempotency.engine.claims import duplicate
from django_idempotency.exceptions import ClaimLost, StoreConflict
from django_idempotency.outcomes import (
    Claimed,
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Outcome,
    Release,
    Replay,
    Snapshot,
    StoredResponse,
    Verdict,
)
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from django_idempotency.stores.base import Seen, Store, Unlocked

T = TypeVar("T")

RESPONSE = StoredResponse(201, (("Content-Type", "a/b"), ("X-Twice", "1"), ("X-Twice", "2")), b"\0\xff\r\n{}")
OTHER = StoredResponse(200, (), b"another")
RIVALS, ROUNDS = 8, 10
SHORTEST = 1  # seconds; a policy's least lease and retention
SLACK = timedelta(seconds=5)
PATIENCE = 20.0


class StoreContract:
    """What every store guarantees: the promises of ``stores.base.Store``, and the engine's outcomes on it.

    ``alias``: the store's alias in ``STORES``. ``close``: called at the end of each thread that used the store.
    """

    alias = "default"

    def close(self) -> None:
        connections.close_all()

    # --- helpers

    def policy(self, **options: Any) -> Policy:
        return Policy(mode="lease", store=self.alias, **options)

    def store(self, **options: Any) -> Store:
        return store_for(self.policy(**options))

    def operation(self, key: str | None = None, *, body: bytes = b"", scope: str = "contract") -> Operation:
        return Operation(scope, key or str(uuid4()), hashlib.sha256(body).digest(), "POST", "/charges/")

    def claimed(self, store: Store | None = None, operation: Operation | None = None) -> Claimed:
        claim = (store or self.store()).claim(operation or self.operation(), uuid4())
        assert isinstance(claim, Claimed), f"a new key was not claimed: {claim}"
        return claim

    def seen(self, claim: Claimed) -> Snapshot:
        record = self.store().read(claim.id)
        assert record is not None, "a record that was created is missing"
        return record

    def taken_over(self, claim: Claimed, store: Store | None = None) -> Claimed:
        store = store or self.store()
        with store.try_lock(claim.id) as record:
            assert isinstance(record, Snapshot), f"a record that is not locked was reported as {record}"
            return store.reassign(record, claim.operation, uuid4())

    def at_once(self, work: Callable[[int], T], rivals: int = RIVALS) -> list[T]:
        """Run ``work(0)``, ``work(1)`` … in a thread each, all started together, and return their results."""
        barrier = threading.Barrier(rivals)

        def run(number: int) -> T:
            try:
                barrier.wait(PATIENCE)
                return work(number)
            finally:
                self.close()

        with ThreadPoolExecutor(rivals) as pool:
            runs = [pool.submit(run, number) for number in range(rivals)]
        return [done.result() for done in runs]

    def elsewhere(self, work: Callable[[], T]) -> T:
        return self.at_once(lambda _number: work(), 1)[0]

    def lapse(self, claim: Claimed) -> None:
        """Wait until the lease has run out by the store's clock, and expire it as the engine does after watching it."""
        until = self.seen(claim).locked_until
        assert until is not None
        self.after(until)
        self.store().expire({claim.token: claim.id})
        assert self.seen(claim).lease_expired

    def after(self, moment: datetime) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.store().now() <= moment:
            assert time.monotonic() < deadline, f"the store's clock does not reach {moment}"
            time.sleep(0.05)

    def asked(self, operation: Operation, **options: Any) -> Outcome:
        return engine.claim(operation, self.policy(**options))

    def performed(self, operation: Operation, verdict: Verdict, **options: Any) -> Claimed:
        claim = self.asked(operation, **options)
        assert isinstance(claim, Claimed), f"could not be run: {claim}"
        with engine.execution(claim, self.policy(**options)) as execution:
            execution.settle(verdict)
        return claim

    # --- claiming

    def test_a_first_claim_makes_a_record_that_is_being_processed(self) -> None:
        store = self.store(lease=30, retention=100)
        claim = self.claimed(store)
        record = self.seen(claim)
        assert (record.id, record.scope, record.key) == (claim.id, claim.operation.scope, claim.operation.key)
        assert (record.status, record.token, record.attempts) == ("processing", claim.token, 1)
        assert (record.mode, record.hold_on_crash) == ("lease", False)
        assert record.fingerprint == claim.operation.fingerprint
        assert (record.on_hold, record.reason, record.response) == (False, "", None)
        assert record.locked_at is not None
        assert record.locked_until is not None
        assert record.locked_until - record.locked_at == timedelta(seconds=30)
        assert record.expires_at - record.created_at == timedelta(seconds=100)

    def test_a_second_claim_shows_the_record_and_changes_nothing(self) -> None:
        claim = self.claimed()
        before = _still(self.seen(claim))
        other = self.operation(claim.operation.key, body=b"other")
        seen = self.store().claim(other, uuid4())
        assert isinstance(seen, Seen)
        assert _still(seen.record) == before == _still(self.seen(claim))

    def test_of_claims_at_once_one_makes_the_record(self) -> None:
        for _round in range(ROUNDS):
            operation, tokens = self.operation(), [uuid4() for _ in range(RIVALS)]
            claims = self.at_once(lambda number: self.store().claim(operation, tokens[number]))  # noqa: B023
            won = [claim for claim in claims if isinstance(claim, Claimed)]
            assert len(won) == 1, f"{len(won)} claims were told that the key is theirs"
            assert self.seen(won[0]).token == won[0].token
            shown = {claim.record.token for claim in claims if isinstance(claim, Seen)}
            assert shown <= {won[0].token}

    def test_a_claim_that_is_repeated_finds_itself(self) -> None:
        claim = self.claimed()
        again = self.store().claim(claim.operation, claim.token)
        assert isinstance(again, Seen)
        assert again.record.token == claim.token

    def test_a_key_is_its_own_in_every_scope(self) -> None:
        key = str(uuid4())
        claims = [self.claimed(operation=self.operation(key, scope=scope)) for scope in ("a", "b")]
        self.store().complete(claims[0], RESPONSE)
        assert self.seen(claims[1]).response is None

    def test_scopes_keys_and_paths_are_kept_as_they_are(self) -> None:
        operation = Operation("tenänt/\U0001f600:1 ", f'"{uuid4()}{{}}:*', bytes(range(32)), "PATCH", "/ä?b=%20")
        record = self.seen(self.claimed(operation=operation))
        assert (record.scope, record.key, record.fingerprint) == (
            operation.scope,
            operation.key,
            operation.fingerprint,
        )

    def test_a_record_tells_the_trace_of_its_last_claim(self) -> None:
        store = self.store(lease=SHORTEST)
        operation = replace(self.operation(), trace=bytes(range(24)))
        claim = self.claimed(store, operation)
        assert self.seen(claim).trace == operation.trace
        self.lapse(claim)
        assert self.taken_over(replace(claim, operation=replace(operation, trace=None)), store)
        assert self.seen(claim).trace is None

    def test_no_transaction_of_others_is_open(self) -> None:
        assert self.store().in_foreign_transaction() is False

    def test_stores_of_one_policy_are_equal(self) -> None:
        """For each store, a process renews all of its leases in one go."""
        policy = self.policy()
        assert len({store_for(policy, self.operation()) for _ in range(2)}) == 1

    # --- completing

    def test_a_response_is_kept_to_the_byte_and_seen_by_all_at_once(self) -> None:
        for failure, status in ((False, "completed"), (True, "failed")):
            for response in (RESPONSE, StoredResponse(204, (), b""), StoredResponse(200, (("A", "é"),), None)):
                claim = self.claimed()
                assert self.store().complete(claim, response, failure=failure)
                record = self.elsewhere(lambda: self.seen(claim))  # noqa: B023
                assert record.response == response, "a response is missing, or not as it was stored"
                assert (record.status, record.token, record.locked_until) == (status, None, None)
                shown = self.store().claim(claim.operation, uuid4())
                assert isinstance(shown, Seen)
                assert shown.record.response == response

    def test_retention_counts_from_the_response(self) -> None:
        store = self.store(retention=100)
        claim = self.claimed(store)
        store.complete(claim, RESPONSE)
        record = self.seen(claim)
        assert timedelta() <= record.now + timedelta(seconds=100) - record.expires_at < SLACK

    def test_a_response_is_final(self) -> None:
        claim = self.claimed()
        assert self.store().complete(claim, RESPONSE)
        writes: dict[str, Callable[[], object]] = {
            "complete": lambda: self.store().complete(claim, OTHER),
            "fail": lambda: self.store().fail(claim, "late"),
            "release": lambda: self.store().release(claim),
            "renew": lambda: self.store().renew([claim]),
        }
        before = _still(self.seen(claim))
        for name, write in writes.items():
            assert not write(), f"{name} changed a completed record, or says that it did"
            assert _still(self.seen(claim)) == before, name

    def test_a_failure_leaves_its_reason(self) -> None:
        for on_hold in (False, True):
            claim = self.claimed()
            assert self.store().fail(claim, "brøke", on_hold=on_hold)
            record = self.seen(claim)
            assert (record.status, record.reason, record.on_hold) == ("failed", "brøke", on_hold)
            assert (record.token, record.response) == (None, None)

    def test_a_released_key_is_as_if_never_used(self) -> None:
        claim = self.claimed()
        assert self.store().release(claim)
        assert self.store().read(claim.id) is None
        assert self.claimed(operation=claim.operation).attempt == 1

    def test_a_renewal_undoes_nothing_that_comes_after_it(self) -> None:
        ends: list[Callable[[Claimed], bool]] = [
            lambda claim: self.store().complete(claim, RESPONSE),
            lambda claim: self.store().release(claim),
        ]
        for end in ends:
            claim = self.claimed()
            assert self.store().renew([claim]) == {claim.token}
            assert end(claim)
            record = self.store().read(claim.id)
            assert record is None or record.response == RESPONSE, "a renewal was written after the end"

    # --- fencing

    def test_a_lost_claim_changes_nothing(self) -> None:
        becomes: dict[str, Callable[[Claimed], object]] = {
            "processing": lambda owner: None,
            "completed": lambda owner: self.store().complete(owner, RESPONSE),
            "failed": lambda owner: self.store().fail(owner, "broke"),
            "absent": lambda owner: self.store().release(owner),
        }
        writes: dict[str, Callable[[Claimed], object]] = {
            "complete": lambda lost: self.store().complete(lost, OTHER),
            "fail": lambda lost: self.store().fail(lost, "late"),
            "release": lambda lost: self.store().release(lost),
            "renew": lambda lost: self.store().renew([lost]),
        }
        for status, become in becomes.items():
            lost = self.claimed()
            become(self.taken_over(lost))
            before = _still(self.store().read(lost.id))
            for name, write in writes.items():
                assert not write(lost), f"{name} by a stale token, of a record that is {status}, was accepted"
                assert _still(self.store().read(lost.id)) == before, f"{name} by a stale token changed the record"

    def test_a_lease_is_renewed_for_those_who_hold_it(self) -> None:
        store = self.store(lease=30)
        claims = [self.claimed(store) for _ in range(5)]
        lost, done = claims[:2]
        owner = self.taken_over(lost, store)
        store.complete(done, RESPONSE)
        before = {claim.id: self.seen(claim).locked_until for claim in claims[2:]}
        assert store.renew([*claims, owner]) == {claim.token for claim in [*claims[2:], owner]}
        for claim in claims[2:]:
            record = self.seen(claim)
            earlier = before[claim.id]
            assert record.locked_until is not None
            assert earlier is not None
            assert record.locked_until > earlier
            assert timedelta() <= record.now + timedelta(seconds=30) - record.locked_until < SLACK
        assert store.renew([]) == set()

    def test_how_long_leases_last_is_told_of_those_there_are(self) -> None:
        short, long = self.claimed(self.store(lease=SHORTEST)), self.claimed(self.store(lease=100))
        done, gone = self.claimed(), self.claimed()
        self.store().complete(done, RESPONSE)
        self.store().release(gone)
        until = self.seen(short).locked_until
        assert until is not None
        self.after(until)
        claims = [short, long, done, gone]
        left = self.store().leases_left({claim.token: claim.id for claim in claims})
        assert left.keys() == {short.token, long.token}
        assert -SLACK * 4 < left[short.token] < timedelta() < left[long.token] <= timedelta(seconds=100)
        assert self.store().leases_left({uuid4(): long.id}) == {}
        assert self.store().leases_left({}) == {}

    def test_only_a_lapsed_lease_expires_and_its_owner_may_renew_it(self) -> None:
        lapsed, living = self.claimed(self.store(lease=SHORTEST)), self.claimed()
        self.store().expire({living.token: living.id})
        assert not self.seen(living).lease_expired
        self.lapse(lapsed)
        record = self.seen(lapsed)
        assert (record.status, record.token, record.locked_until) == ("processing", lapsed.token, record.locked_at)
        assert self.store(lease=100).renew([lapsed]) == {lapsed.token}
        self.store().expire({lapsed.token: lapsed.id})
        assert not self.seen(lapsed).lease_expired

    # --- taking over

    def test_there_is_nothing_to_lock_where_there_is_no_record(self) -> None:
        with self.store().try_lock(self.operation().id) as record:
            assert record is Unlocked.ABSENT

    def test_a_takeover_has_a_new_token_and_one_more_attempt(self) -> None:
        dead = self.claimed()
        other = self.operation(dead.operation.key, body=b"other")
        with self.store().try_lock(dead.id) as record:
            assert isinstance(record, Snapshot)
            owner = self.store().reassign(record, other, uuid4())
        assert (owner.attempt, owner.taken_over) == (2, True)
        record = self.seen(dead)
        assert (record.token, record.attempts, record.status) == (owner.token, 2, "processing")
        assert record.fingerprint == other.fingerprint
        assert record.locked_until is not None
        assert record.locked_until > record.now

    def test_a_retry_of_a_failure_starts_with_nothing_of_it(self) -> None:
        failed = self.claimed()
        self.store().fail(failed, "broke", on_hold=True)
        owner = self.taken_over(failed)
        assert (owner.attempt, owner.taken_over) == (2, False)
        record = self.seen(failed)
        assert (record.status, record.on_hold, record.reason) == ("processing", False, "")

    def test_of_takeovers_at_once_one_succeeds(self) -> None:
        for _round in range(ROUNDS):
            dead = self.claimed()
            tokens = [uuid4() for _ in range(RIVALS)]
            owners = self.at_once(lambda number: self._reassigned(dead, tokens[number]))  # noqa: B023
            # One may follow another. Then each is told a different attempt, and the record has the last one's token.
            attempts = sorted(owner.attempt for owner in owners if owner is not None)
            assert attempts == list(range(2, 2 + len(attempts))), f"simultaneous takeovers got the attempts {attempts}"
            assert attempts, "no retry took over"
            last = max((owner for owner in owners if owner is not None), key=lambda owner: owner.attempt)
            record = self.seen(dead)
            assert (record.token, record.attempts) == (last.token, last.attempt)

    def _reassigned(self, dead: Claimed, token: UUID) -> Claimed | None:
        """Take over as the engine does."""
        with suppress(StoreConflict), self.store().try_lock(dead.id) as record:
            return self.store().reassign(record, dead.operation, token) if isinstance(record, Snapshot) else None
        return None

    def test_a_renewal_and_a_takeover_do_not_both_succeed(self) -> None:
        store = self.store()
        writes: dict[str, Callable[[Claimed], Any]] = {
            "renew": lambda owner: store.renew([owner]),
            "complete": lambda owner: store.complete(owner, RESPONSE),
            "fail": lambda owner: store.fail(owner, "broke"),
            "release": lambda owner: store.release(owner),
        }
        for name, write in writes.items():
            for change in (self._reassign, self._hold):
                owner = self.claimed(store)
                written, changed = self._meanwhile(owner, write, change)
                assert not (written and changed), f"{name} was accepted, and so was {change.__name__}"
                assert written or changed

    def _reassign(self, record: Snapshot, claim: Claimed) -> None:
        self.store().reassign(record, claim.operation, uuid4())

    def _hold(self, record: Snapshot, claim: Claimed) -> None:
        self.store().hold(record, "outcome unknown")

    def _meanwhile(
        self, owner: Claimed, write: Callable[[Claimed], Any], change: Callable[[Snapshot, Claimed], None]
    ) -> tuple[bool, bool]:
        """Return whether an owner's ``write`` and the ``change`` of a rival, who looked before it, were accepted."""
        writing: Future[Any] | None = None
        changed = False
        with ThreadPoolExecutor(1) as pool:
            with suppress(StoreConflict), self.store().try_lock(owner.id) as record:
                assert isinstance(record, Snapshot)
                writing = pool.submit(self._closing, write, owner)
                _wait_a_little(writing)  # if it takes the lock that is held here, it comes after the change
                change(record, owner)
                changed = True
            assert writing is not None
            try:
                return bool(writing.result(PATIENCE)), changed
            except StoreConflict:
                return False, changed

    def _closing(self, write: Callable[[Claimed], Any], claim: Claimed) -> Any:
        try:
            return write(claim)
        finally:
            self.close()

    def test_what_is_on_hold_stays_for_an_operator(self) -> None:
        store = self.store(retention=SHORTEST, lease=SHORTEST)
        claim = self.claimed(store)
        with store.try_lock(claim.id) as record:
            assert isinstance(record, Snapshot)
            store.hold(record, "outcome unknown")
        held = self.seen(claim)
        assert (held.status, held.on_hold, held.reason, held.token) == ("failed", True, "outcome unknown", None)
        self.after(held.expires_at)
        assert self.seen(claim).on_hold, "a record on hold is gone"

    # --- counting, and the clock

    def test_counting_replays_changes_nothing_else_and_makes_nothing(self) -> None:
        claim, absent = self.claimed(), self.operation()
        self.store().complete(claim, RESPONSE)
        before = _still(self.seen(claim))
        self.store().count_replays({claim.id: 3, absent.id: 1})
        assert _still(self.seen(claim)) == before
        assert self.store().read(absent.id) is None

    def test_the_clock_has_a_time_zone_and_goes_forward(self) -> None:
        first = self.store().now()
        claim = self.claimed()
        record = self.seen(claim)
        assert first.utcoffset() is not None
        assert first <= record.created_at <= record.now <= self.store().now()

    def test_the_records_can_be_listed(self) -> None:
        store = self.store()
        if not store.listing:
            return
        claim = self.claimed(store)
        assert claim.id in {record.id for record in store.records()}

    def test_a_record_that_an_operator_was_shown_can_be_deleted(self) -> None:
        if not self.store().listing:
            return
        claim = self.claimed()
        shown = self.seen(claim)
        assert self.store().complete(claim, RESPONSE)
        assert not self.store().delete(shown), "a record that had changed since it was shown was deleted"
        assert self.seen(claim).response == RESPONSE
        assert self.store().delete(self.seen(claim))
        assert self.store().read(claim.id) is None

    # --- the engine's outcomes

    def test_a_retry_gets_the_response_and_another_request_a_mismatch(self) -> None:
        operation = self.operation()
        self.performed(operation, Keep(RESPONSE))
        assert self.asked(operation) == Replay(RESPONSE)
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()

    def test_a_duplicate_in_flight_is_told_how_long_to_wait(self) -> None:
        operation = self.operation()
        self.claimed(self.store(lease=30), operation)
        outcome = self.asked(operation)
        assert isinstance(outcome, InFlight)
        assert 1 <= outcome.retry_after <= 30
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()

    def test_a_duplicate_that_waits_gets_the_response_of_the_first(self) -> None:
        operation = self.operation()
        owner = self.claimed(self.store(), operation)
        waiting = engine.begin_claim(operation, self.policy(on_conflict="wait", wait_timeout=PATIENCE))
        assert isinstance(waiting, engine.Pending)
        with closing(waiting):
            assert waiting.in_flight
            assert self.store().complete(owner, RESPONSE)
            assert waiting.ask() == Replay(RESPONSE)

    def test_a_duplicate_that_waits_in_vain_is_told_so(self) -> None:
        operation = self.operation()
        self.claimed(self.store(), operation)
        began = time.monotonic()
        assert isinstance(self.asked(operation, on_conflict="wait", wait_timeout=0.2), InFlight)
        assert time.monotonic() - began >= 0.2

    def test_a_failure_is_run_again_and_a_released_key_anew(self) -> None:
        operation = self.operation()
        assert self.performed(operation, Fail("broke")).attempt == 1
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()
        assert self.performed(operation, Release()).attempt == 2
        assert self.performed(operation, Keep(RESPONSE)).attempt == 1

    def test_a_dead_owner_is_taken_over_once_its_lease_ran_out(self) -> None:
        operation = self.operation()
        dead = self.claimed(self.store(lease=SHORTEST), operation)
        self.lapse(dead)
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()
        outcomes = self.at_once(lambda _number: self.asked(operation))
        won = [outcome for outcome in outcomes if isinstance(outcome, Claimed)]
        assert [(owner.attempt, owner.taken_over) for owner in won] == [(2, True)]
        assert not self.store().complete(dead, RESPONSE)
        assert isinstance(duplicate(operation, self.policy()), InFlight)

    def test_a_dead_owner_is_put_on_hold_where_the_policy_says_so(self) -> None:
        operation = self.operation()
        dead = self.claimed(self.store(lease=SHORTEST, on_crash="hold"), operation)
        self.lapse(dead)
        assert isinstance(self.asked(operation), OnHold)
        assert isinstance(self.asked(operation), OnHold)
        assert self.asked(self.operation(operation.key, body=b"other")) == Mismatch()
        assert not self.store().complete(dead, RESPONSE)

    def test_what_has_expired_is_run_as_if_new(self) -> None:
        operation = self.operation()
        claim = self.performed(operation, Keep(RESPONSE), lease=SHORTEST, retention=SHORTEST)
        record = self.store().read(claim.id)
        if record is not None:
            self.after(record.expires_at)
        again = self.performed(self.operation(operation.key, body=b"other"), Keep(OTHER))
        assert (again.attempt, again.taken_over) == (1, False)
        assert self.asked(self.operation(operation.key, body=b"other")) == Replay(OTHER)

    def test_a_run_that_was_taken_over_is_told_so(self) -> None:
        operation = self.operation()
        claim = self.asked(operation)
        assert isinstance(claim, Claimed)
        try:
            with engine.execution(claim, self.policy()) as execution:
                owner = self.taken_over(claim)
                execution.settle(Keep(OTHER))
        except ClaimLost:
            pass
        else:
            raise AssertionError("an owner that lost its claim was told that its response is stored")
        assert self.store().complete(owner, RESPONSE)
        assert self.asked(operation) == Replay(RESPONSE)


def _still(record: Snapshot | None) -> dict[str, Any] | None:
    """Return what stays the same while no caller writes."""
    return (
        None
        if record is None
        else {name: getattr(record, name) for name in Snapshot.__dataclass_fields__ if name != "now"}
    )


def _wait_a_little(writing: Future[Any]) -> None:
    with suppress(TimeoutError, StoreConflict):
        writing.result(0.3)


def broken(contract: type[StoreContract], names: Sequence[str] = ()) -> dict[str, Exception]:
    """Run a contract, or the tests with these ``names``, and return what failed, by the test's name."""
    failed = {}
    for name in names or [name for name in dir(contract) if name.startswith("test_")]:
        try:
            getattr(contract(), name)()
        except Exception as error:  # a broken store may raise anything
            failed[name] = error
    return failed
