"""What a record means for a request, in every state it can be in; and what the running
view is given.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from django_idempotency import engine
from django_idempotency.engine import Context
from django_idempotency.engine.decisions import decide
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import (
    Available,
    Claimed,
    InFlight,
    Mismatch,
    OnHold,
    Operation,
    Replay,
    Snapshot,
    StoredResponse,
)
from django_idempotency.values.policy import Lease, Policy

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINE, OTHER = b"m" * 32, b"o" * 32


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def record(status, **changed):
    live = status in ("started", "processing")
    answered = status == "completed"
    values = {
        "id": record_id("s", "k"),
        "scope": "s",
        "key": "k",
        "fingerprint": MINE,
        "mode": "lease",
        "hold_on_crash": False,
        "created_at": at(-60),
        "status": status,
        "attempts": 1,
        "on_hold": False,
        "reason": "",
        "token": UUID(int=1) if live else None,
        "locked_at": at(-5) if live else None,
        "locked_until": at(30) if live else None,
        "expires_at": at(1000),
        "response_status": 201 if answered else None,
        "response_headers": [["A", "b"]] if answered else None,
        "response_body": b"x" if answered else None,
        "now": NOW,
    }
    return Snapshot(**values | changed)


RESPONSE = Replay(StoredResponse(201, (("A", "b"),), b"x"))
FAILURE = {"response_status": 409, "response_headers": [], "response_body": None}


@pytest.mark.parametrize(
    ("seen", "decision"),
    [
        # processing and started, by lease
        (record("processing"), InFlight(2)),
        (record("started"), InFlight(2)),
        (record("processing", locked_until=at(0.2)), InFlight(2)),
        (record("processing", locked_at=at(-1)), InFlight(1)),
        (record("processing", locked_at=at(-12)), InFlight(6)),
        (record("processing", locked_at=at(-600)), InFlight(10)),
        # lapsed, but nobody has watched it
        (record("processing", locked_until=at(-1)), InFlight(2)),
        (record("processing", locked_until=at(-1), hold_on_crash=True), InFlight(2)),
        # expired: it ends where it began
        (record("processing", locked_until=at(-5)), Available()),
        (record("started", locked_until=at(-5)), Available()),
        (
            record("processing", locked_until=at(-5), hold_on_crash=True),
            OnHold("its lease ran out while it was running"),
        ),
        (record("processing", hold_on_crash=True), InFlight(2)),
        # atomic: the row lock decides, once the grace is over; leases don't matter
        (record("processing", mode="atomic"), Available()),
        (record("processing", mode="atomic", locked_at=at(0)), Available(after=2.0)),
        (record("processing", mode="atomic", locked_at=at(-1.5)), Available(after=0.5)),
        (record("processing", mode="atomic", locked_at=at(1)), Available(after=3.0)),
        (
            record(
                "processing", mode="atomic", hold_on_crash=True, locked_until=at(-1)
            ),
            Available(),
        ),
        # answered
        (record("completed"), RESPONSE),
        (record("failed", **FAILURE), Replay(StoredResponse(409, (), None))),
        # failed without a response
        (record("failed"), Available()),
        (record("failed", on_hold=True, reason="why"), OnHold("why")),
        # expired
        (record("completed", expires_at=at(0)), Available()),
        (record("completed", expires_at=at(0.001)), RESPONSE),
        (
            record("failed", expires_at=at(-1), on_hold=True, reason="why"),
            OnHold("why"),
        ),
        (record("failed", expires_at=at(-1), **FAILURE), Available()),
        (record("processing", expires_at=at(-1)), InFlight(2)),
        (record("processing", expires_at=at(-1), mode="atomic"), Available()),
    ],
)
def test_the_state_of_a_record_decides_about_the_same_request(seen, decision):
    before = replace(seen)
    assert decide(seen, MINE, grace=2, lease=60) == decision
    assert decide(seen, MINE, grace=2, lease=60) == decision, "deciding has no memory"
    assert seen == before


def test_an_atomic_claim_has_a_grace_only_if_it_is_stated():
    assert (
        decide(record("processing", mode="atomic", locked_at=at(0)), MINE)
        == Available()
    )


@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize(
    "seen",
    [
        record("started"),
        record("processing"),
        record("processing", locked_until=at(-1)),
        record("processing", locked_until=at(-1), hold_on_crash=True),
        record("processing", expires_at=at(-1)),
        record("completed"),
        record("failed"),
        record("failed", on_hold=True),
        record("failed", **FAILURE),
    ],
)
def test_another_request_is_a_mismatch_before_anything_else(seen, mode):
    assert decide(replace(seen, mode=mode), OTHER) == Mismatch()


@pytest.mark.parametrize("changed", [{}, FAILURE])
def test_once_expired_the_key_is_free_for_any_request(changed):
    assert decide(record("failed", expires_at=at(-1), **changed), OTHER) == Available()
    assert decide(record("completed", expires_at=at(-1)), OTHER) == Available()


OPERATION = Operation("user:1", "the-raw-key", MINE)


def context(operation=OPERATION, attempt=1, **policy):
    return Context(Claimed(operation, uuid4(), attempt), Policy(**policy))


def test_the_view_sees_key_scope_and_attempt():
    seen = context(attempt=3)
    assert (seen.key, seen.scope, seen.attempt) == ("the-raw-key", "user:1", 3)


def test_renewing_extends_the_lease_by_the_policy(db):
    running = Context(
        engine.claim(OPERATION, Policy(mode=Lease(seconds=20))),
        Policy(mode=Lease(seconds=500)),
    )
    before = IdempotencyRecord.objects.get().locked_until
    running.renew()
    after = IdempotencyRecord.objects.get()
    assert timedelta(seconds=479) < after.locked_until - before < timedelta(seconds=600)
    assert after.token == running.claim.token


def test_in_atomic_mode_there_is_nothing_to_renew():
    context(mode="atomic").renew()
