"""The contract of a store, as tests that every store runs, including those of third
parties.

    class TestMyStore(StoreContract):
        alias = "mine"  # in STORES, in the settings of the test run

pytest collects the class; with unittest, inherit from ``TransactionTestCase`` too. A
store in a database needs real commits (``transactional_db``). The tests use keys of
their own and clean nothing up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

from django_idempotency import ClaimLost, Lease
from django_idempotency.contrib.testing.store_cases import (
    PATIENCE,
    RIVALS,
    StoreCase,
    still,
)
from django_idempotency.extending import FOR_GOOD
from django_idempotency.extending.stores import (
    Claimed,
    InFlight,
    Keep,
    OnHold,
    Operation,
    Pending,
    Replay,
    Seen,
    Snapshot,
    Store,
    StoreConflict,
    StoredResponse,
    Unlocked,
    begin_claim,
    duplicate,
    execution,
    store_for,
)

RESPONSE = StoredResponse(
    201, (("Content-Type", "a/b"), ("X-Twice", "1"), ("X-Twice", "2")), b"\0\xff\r\n{}"
)
OTHER = StoredResponse(200, (), b"another")
ROUNDS = 5
SHORTEST = 1  # seconds; a policy's least lease and retention
SHORT_LEASE = Lease(seconds=SHORTEST)
SLACK = timedelta(seconds=20)  # what a busy machine takes for two statements
MEANWHILE = 0.1  # seconds; longer than a write takes that waits for nobody

# What an owner does with its claim; each returns whether the store says that it did it.
WRITES: dict[str, Callable[[Store, Claimed], object]] = {
    "complete": lambda store, claim: store.complete(claim, OTHER),
    "fail": lambda store, claim: store.fail(claim, "late"),
    "release": lambda store, claim: store.release(claim),
    "renew": lambda store, claim: store.renew([claim]),
}
# What a caller that finds the owner dead does with the record that it was shown.
CHANGES: dict[str, Callable[[Store, Snapshot, Operation], object]] = {
    "reassign": lambda store, record, operation: store.reassign(
        record, operation, uuid4()
    ),
    "hold": lambda store, record, _operation: store.hold(record, "outcome unknown"),
}


def _delete_held(case: StoreCase, claim: Claimed) -> None:
    case.held(claim)
    case.store().delete(case.seen(claim))


def _delete_completed(case: StoreCase, claim: Claimed) -> None:
    case.store().complete(case.taken_over(claim), RESPONSE)
    case.store().delete(case.seen(claim))


# How the record of an owner that is frozen can be gone by the time it ends.
DELETIONS: dict[str, Callable[[StoreCase, Claimed], object]] = {
    "taken over, then released": lambda case, claim: case.store().release(
        case.taken_over(claim)
    ),
    "taken over, completed, then erased": _delete_completed,
    "put on hold, then deleted": _delete_held,
    "deleted": lambda case, claim: case.store().delete(case.seen(claim)),
}


class StoreContract(StoreCase):
    """What every store guarantees: the promises of ``stores.base.Store``, and the
    engine's outcomes on it.
    """

    # --- claiming

    def test_a_first_claim_makes_a_record_that_is_being_processed(self) -> None:
        claim = self.claimed(self.store(mode=Lease(seconds=30), retention=100))
        made = claim.operation
        record = self.seen(
            claim,
            id=claim.id,
            scope=made.scope,
            key=made.key,
            fingerprint=made.fingerprint,
        )
        self.seen(
            claim,
            status="processing",
            token=claim.token,
            attempts=1,
            mode="lease",
            hold_on_crash=False,
        )
        self.seen(claim, on_hold=False, reason="", response=None)
        assert record.locked_at is not None
        assert self.lease_end(claim) - record.locked_at == timedelta(seconds=30)
        assert record.expires_at - record.created_at == timedelta(seconds=100)

    def test_a_second_claim_shows_the_record_and_changes_nothing(self) -> None:
        claim = self.claimed()
        with self.unchanged(claim.id, "a second claim"):
            shown = self.claimed_again(
                self.operation(claim.operation.key, body=b"other")
            )
        assert still(shown) == still(self.seen(claim))

    def test_of_claims_at_once_one_makes_the_record(self) -> None:
        def claim(operation: Operation, token: UUID) -> object:
            with suppress(StoreConflict):  # the winner's write took too long
                return self.store().claim(operation, token)
            return None

        for _round in range(ROUNDS):
            operation, tokens = self.operation(), [uuid4() for _ in range(RIVALS)]
            claims = self.at_once(
                lambda number: claim(operation, tokens[number])  # noqa: B023
            )
            won = [claim for claim in claims if isinstance(claim, Claimed)]
            assert len(won) == 1, f"{len(won)} claims succeeded"
            self.seen(won[0], token=won[0].token)
            assert {
                claim.record.token for claim in claims if isinstance(claim, Seen)
            } <= {won[0].token}

    def test_a_claim_that_is_repeated_finds_itself(self) -> None:
        claim = self.claimed()
        assert self.claimed_again(claim.operation, claim.token).token == claim.token

    def test_a_key_is_its_own_in_every_scope(self) -> None:
        key = str(uuid4())
        one, other = (
            self.claimed(operation=self.operation(key, scope=scope))
            for scope in ("a", "b")
        )
        self.store().complete(one, RESPONSE)
        self.seen(other, response=None)

    def test_scopes_keys_and_paths_are_kept_as_they_are(self) -> None:
        operation = Operation(
            "tenänt/\U0001f600:1 ",
            f'"{uuid4()}{{}}:*',
            bytes(range(32)),
            "PATCH",
            "/ä?b=%20",
        )
        claim = self.claimed(operation=operation)
        self.seen(
            claim,
            scope=operation.scope,
            key=operation.key,
            fingerprint=operation.fingerprint,
        )

    def test_no_transaction_of_others_is_open(self) -> None:
        assert self.store().in_foreign_transaction() is False

    def test_stores_of_one_policy_are_equal(self) -> None:
        """For each store, a process renews all of its leases in one go."""
        policy = self.policy()
        assert len({store_for(policy, self.operation()) for _ in range(2)}) == 1

    # --- completing

    def test_a_response_is_kept_to_the_byte_and_seen_by_all_at_once(self) -> None:
        for failure, status in ((False, "completed"), (True, "failed")):
            for response in (
                RESPONSE,
                StoredResponse(204, (), b""),
                StoredResponse(200, (("A", "é"),), None),
            ):
                claim = self.claimed()
                assert self.store().complete(claim, response, failure=failure)
                expected = {
                    "response": response,
                    "status": status,
                    "token": None,
                    "locked_until": None,
                }
                self.at_once(lambda _number: self.seen(claim, **expected), 1)  # noqa: B023
                assert self.claimed_again(claim.operation).response == response

    def test_retention_counts_from_the_response(self) -> None:
        for retention in (100, FOR_GOOD):
            claim = self.claimed()
            self.store(retention=retention).complete(claim, RESPONSE)
            record = self.seen(claim)
            left = record.expires_at - record.now
            assert timedelta() <= timedelta(seconds=retention) - left < SLACK

    def test_a_response_is_final(self) -> None:
        claim = self.claimed()
        assert self.store().complete(claim, RESPONSE)
        for name, write in WRITES.items():
            with self.unchanged(claim.id, name):
                assert not write(self.store(), claim), (
                    f"{name} says that it changed a completed record"
                )

    def test_a_failure_leaves_its_reason(self) -> None:
        for on_hold in (False, True):
            claim = self.claimed()
            assert self.store().fail(claim, "brøke", on_hold=on_hold)
            self.seen(
                claim,
                status="failed",
                reason="brøke",
                on_hold=on_hold,
                token=None,
                response=None,
            )

    def test_a_released_key_is_as_if_never_used(self) -> None:
        claim = self.claimed()
        assert self.store().release(claim)
        assert self.store().read(claim.id) is None
        assert self.claimed(operation=claim.operation).attempt == 1

    def test_a_renewal_undoes_nothing_that_comes_after_it(self) -> None:
        for end in ("complete", "release"):
            claim = self.claimed()
            assert self.store().renew([claim]) == {claim.token}
            assert WRITES[end](self.store(), claim)
            record = self.store().read(claim.id)
            assert record is None or record.response == OTHER, (
                "a renewal was written after the end"
            )

    # --- fencing

    def test_a_lost_claim_changes_nothing(self) -> None:
        for end in (None, *WRITES):
            lost = self.claimed()
            owner = self.taken_over(lost)
            if end is not None:
                WRITES[end](self.store(), owner)
            for name, write in WRITES.items():
                with self.unchanged(lost.id, f"{name} by a stale token"):
                    assert not write(self.store(), lost), (
                        f"{name} by a stale token was accepted after {end}"
                    )

    def test_a_lease_is_renewed_for_those_who_hold_it(self) -> None:
        store = self.store(mode=Lease(seconds=30))
        lost, done, *living = claims = [self.claimed(store) for _ in range(5)]
        owner = self.taken_over(lost)
        store.complete(done, RESPONSE)
        before = {claim.id: self.lease_end(claim) for claim in living}
        assert store.renew([*claims, owner]) == {
            claim.token for claim in [*living, owner]
        }
        for claim in living:
            until = self.lease_end(claim)
            assert until > before[claim.id]
            assert (
                timedelta()
                <= self.seen(claim).now + timedelta(seconds=30) - until
                < SLACK
            )
        assert store.renew([]) == set()

    def test_how_long_leases_last_is_told_of_those_there_are(self) -> None:
        short, long = (
            self.claimed(self.store(mode=mode))
            for mode in (SHORT_LEASE, Lease(seconds=100))
        )
        done, gone = self.claimed(), self.claimed()
        self.store().complete(done, RESPONSE)
        self.store().release(gone)
        self.after(self.lease_end(short))
        left = self.store().leases_left(
            {claim.token: claim.id for claim in (short, long, done, gone)}
        )
        assert left.keys() == {short.token, long.token}
        assert (
            -SLACK
            < left[short.token]
            < timedelta()
            < left[long.token]
            <= timedelta(seconds=100)
        )
        assert (
            self.store().leases_left({uuid4(): long.id})
            == self.store().leases_left({})
            == {}
        )

    def test_only_a_lapsed_lease_expires_and_its_owner_may_renew_it(self) -> None:
        lapsed, living = self.claimed(self.store(mode=SHORT_LEASE)), self.claimed()
        self.store().expire({living.token: living.id})
        assert not self.seen(living).lease_expired
        self.lapse(lapsed)
        record = self.seen(lapsed, status="processing", token=lapsed.token)
        assert record.locked_until == record.locked_at
        assert self.store(mode=Lease(seconds=100)).renew([lapsed]) == {lapsed.token}
        self.store().expire({lapsed.token: lapsed.id})
        assert not self.seen(lapsed).lease_expired

    # --- taking over

    def test_there_is_nothing_to_lock_where_there_is_no_record(self) -> None:
        with self.store().try_lock(self.operation().id) as record:
            assert record is Unlocked.ABSENT

    def test_a_takeover_has_a_new_token_and_one_more_attempt(self) -> None:
        dead = self.claimed()
        other = self.operation(dead.operation.key, body=b"other")
        owner = self.taken_over(replace(dead, operation=other))
        assert (owner.attempt, owner.taken_over) == (2, True)
        record = self.seen(
            dead,
            token=owner.token,
            attempts=2,
            status="processing",
            fingerprint=other.fingerprint,
        )
        assert self.lease_end(dead) > record.now

    def test_a_retry_of_a_failure_starts_with_nothing_of_it(self) -> None:
        failed = self.claimed()
        self.store().fail(failed, "broke", on_hold=True)
        owner = self.taken_over(failed)
        assert (owner.attempt, owner.taken_over) == (2, False)
        self.seen(failed, status="processing", on_hold=False, reason="")

    def test_of_takeovers_at_once_one_succeeds(self) -> None:
        def take_over(dead: Claimed, token: UUID) -> Claimed | None:
            with suppress(StoreConflict), self.store().try_lock(dead.id) as record:
                return (
                    self.store().reassign(record, dead.operation, token)
                    if isinstance(record, Snapshot)
                    else None
                )
            return None

        for _round in range(ROUNDS):
            dead, tokens = self.claimed(), [uuid4() for _ in range(RIVALS)]
            owners = [
                owner
                for owner in self.at_once(
                    lambda number: take_over(dead, tokens[number])  # noqa: B023
                )
                if owner
            ]
            assert owners, "no retry took over"
            # One may follow another. Then each gets a different attempt, and the record
            # has the last one's token.
            owners.sort(key=lambda owner: owner.attempt)
            attempts = [owner.attempt for owner in owners]
            assert attempts == [*range(2, 2 + len(owners))], (
                f"simultaneous takeovers got the attempts {attempts}"
            )
            self.seen(dead, token=owners[-1].token, attempts=attempts[-1])

    def test_a_renewal_and_a_takeover_do_not_both_succeed(self) -> None:
        for name, write in WRITES.items():
            for change in CHANGES:
                written, changed = self._meanwhile(write, CHANGES[change])
                assert not (written and changed), (
                    f"{name} was accepted, and so was {change}"
                )
                assert written or changed, f"neither {name} nor {change} was accepted"

    def _meanwhile(
        self,
        write: Callable[[Store, Claimed], object],
        change: Callable[[Store, Snapshot, Operation], object],
    ) -> tuple[bool, bool]:
        """Return whether an owner's ``write`` and the ``change`` of a rival, who looked
        before it, were accepted.
        """
        owner, changed = self.claimed(), False

        def written() -> bool:
            try:
                return bool(write(self.store(), owner))
            except StoreConflict:
                return False
            finally:
                self.close()

        with ThreadPoolExecutor(1) as pool:
            with suppress(StoreConflict), self.shown(owner) as record:
                writing = pool.submit(written)
                # if it takes the lock that is held here, it comes after the change
                with suppress(TimeoutError):
                    writing.result(MEANWHILE)
                change(self.store(), record, owner.operation)
                changed = True
            return writing.result(PATIENCE), changed

    def test_what_is_on_hold_stays_for_an_operator(self) -> None:
        brief = self.store(retention=SHORTEST)
        claim = self.claimed(brief)
        self.held(claim, brief)
        held = self.seen(
            claim, status="failed", on_hold=True, reason="outcome unknown", token=None
        )
        self.after(held.expires_at)
        self.seen(claim, on_hold=True)

    # --- counting, listing, and the clock

    def test_counting_replays_changes_nothing_else_and_makes_nothing(self) -> None:
        claim, absent = self.claimed(), self.operation()
        self.store().complete(claim, RESPONSE)
        with (
            self.unchanged(claim.id, "counting"),
            self.unchanged(absent.id, "counting"),
        ):
            self.store().count_replays({claim.id: 3, absent.id: 1})

    def test_the_clock_has_a_time_zone_and_goes_forward(self) -> None:
        first, second = self.seen(self.claimed()), self.seen(self.claimed())
        assert first.now.utcoffset() is not None
        assert first.created_at <= first.now <= second.created_at <= second.now

    def test_records_are_unfinished_until_they_have_ended(self) -> None:
        store = self.store()
        running, completed, failed, released, held, lapsed, deleted, again = claims = [
            self.claimed() for _ in range(8)
        ]
        store.complete(completed, RESPONSE)
        store.fail(failed, "broke")
        store.release(released)
        store.fail(held, "nobody knows", on_hold=True)
        self.held(lapsed)
        assert store.delete(self.seen(deleted))
        store.fail(again, "broke")
        self.taken_over(again)
        mine = {claim.id for claim in claims}
        assert mine & {record.id for record in store.records()} == mine - {
            released.id,
            deleted.id,
        }
        left = {
            record.id: record.on_hold
            for record in store.unfinished()
            if record.id in mine
        }
        assert left == {
            running.id: False,
            held.id: True,
            lapsed.id: True,
            again.id: False,
        }

    def test_a_record_that_an_operator_was_shown_can_be_deleted(self) -> None:
        claim = self.claimed()
        shown = self.seen(claim)
        assert self.store().complete(claim, RESPONSE)
        assert not self.store().delete(shown), (
            "a record that had changed since it was shown was deleted"
        )
        assert self.store().delete(self.seen(claim, response=RESPONSE))
        assert self.store().read(claim.id) is None

    # --- the engine's outcomes

    def test_a_retry_gets_the_response_and_another_request_a_mismatch(self) -> None:
        operation = self.operation()
        self.performed(operation, Keep(RESPONSE))
        assert self.asked(operation) == Replay(RESPONSE)
        self.refuses_another(operation)

    def test_a_duplicate_that_waits_gets_the_response_of_the_first(self) -> None:
        owner = self.claimed()
        waiting = begin_claim(owner.operation, self.policy(wait=PATIENCE))
        assert isinstance(waiting, Pending)
        with closing(waiting):
            assert self.store().complete(owner, RESPONSE)
            assert waiting.ask() == Replay(RESPONSE)

    def test_a_dead_owner_is_taken_over_once_its_lease_ran_out(self) -> None:
        dead = self.claimed(self.store(mode=SHORT_LEASE))
        self.lapse(dead)
        self.refuses_another(dead.operation)
        outcomes = self.at_once(lambda _number: self.asked(dead.operation))
        won = [outcome for outcome in outcomes if isinstance(outcome, Claimed)]
        assert [(owner.attempt, owner.taken_over) for owner in won] == [(2, True)]
        assert not self.store().complete(dead, RESPONSE)
        assert isinstance(duplicate(dead.operation, self.policy()), InFlight)

    def test_a_dead_owner_is_put_on_hold_where_the_policy_says_so(self) -> None:
        dead = self.claimed(self.store(mode=Lease(seconds=SHORTEST, on_crash="hold")))
        self.lapse(dead)
        for _time in range(2):
            assert isinstance(self.asked(dead.operation), OnHold)
        self.refuses_another(dead.operation)
        assert not self.store().complete(dead, RESPONSE)

    def test_what_has_expired_is_run_as_if_new(self) -> None:
        operation = self.operation()
        other = self.operation(operation.key, body=b"other")
        claim = self.performed(
            operation, Keep(RESPONSE), mode=SHORT_LEASE, retention=SHORTEST
        )
        if record := self.store().read(claim.id):
            self.after(record.expires_at)
        again = self.performed(other, Keep(OTHER))
        assert (again.attempt, again.taken_over) == (1, False)
        assert self.asked(other) == Replay(OTHER)

    def test_a_run_that_was_taken_over_is_told_so(self) -> None:
        claim = self.asked(self.operation())
        assert isinstance(claim, Claimed)
        with suppress(ClaimLost):
            with execution(claim, self.policy()) as running:
                owner = self.taken_over(claim)
                running.verdict = Keep(OTHER)
            raise AssertionError(
                "the completion of an owner that lost its claim was accepted"
            )
        assert self.store().complete(owner, RESPONSE)
        assert self.asked(claim.operation) == Replay(RESPONSE)

    def test_the_response_of_a_lost_claim_is_not_stored_once_the_record_is_gone(
        self,
    ) -> None:
        for name, delete in DELETIONS.items():
            claim = self.asked(self.operation())
            assert isinstance(claim, Claimed)
            with suppress(ClaimLost):
                with execution(claim, self.policy()) as running:
                    delete(self, claim)
                    running.verdict = Keep(OTHER)
                raise AssertionError(f"a lost claim was completed after: {name}")
            assert self.store().read(claim.id) is None, f"stored anew after: {name}"
