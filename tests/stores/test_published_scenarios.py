"""The scenarios that idemkit publishes for backends (``idemkit.conformance``, 1.0): which test of ours is each.

The contract runs on PostgreSQL, MariaDB, SQLite, Redis, Valkey, Redis Cluster, the cached store and a
store outside the package. ``idemkit`` itself has another interface, so its code can't be called on our stores.
"""

from __future__ import annotations

from django_idempotency.contrib.testing.stores import StoreContract

# By its identifier there: what it says in our words, and what holds our stores to it.
SCENARIOS = {
    "atomic-claim": "test_a_first_claim_makes_a_record_that_is_being_processed",
    "duplicate-claim": "test_a_second_claim_shows_the_record_and_changes_nothing",
    "conditional-complete": "test_a_response_is_kept_to_the_byte_and_seen_by_all_at_once",
    "fencing-wrong-token": "test_a_lost_claim_changes_nothing",
    "release-clears-claim": "test_a_released_key_is_as_if_never_used",
    "lease-reclaim": "test_a_takeover_has_a_new_token_and_one_more_attempt",
    "fenced-after-reclaim": "test_a_dead_owner_is_taken_over_once_its_lease_ran_out",
    "concurrent-claim-exactly-one": "test_of_claims_at_once_one_makes_the_record",
    "in-flight-wait": "test_a_duplicate_that_waits_gets_the_response_of_the_first",
    "wait-timeout": "test_a_duplicate_that_waits_in_vain_is_told_so",
    "completed-ttl-expiry": "test_what_has_expired_is_run_as_if_new",
    "renew-extends-lease": "test_only_a_lapsed_lease_expires_and_its_owner_may_renew_it",
    "renew-fenced": "test_a_lease_is_renewed_for_those_who_hold_it",
}


def test_each_published_scenario_has_a_test_of_its_own_in_the_contract():
    assert all(callable(getattr(StoreContract, test)) for test in SCENARIOS.values())
    assert len(set(SCENARIOS.values())) == len(SCENARIOS) == 13
