"""Records for maintenance to work on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import factory
import pytest
from django.db import connections

from django_idempotency import engine
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Claimed
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import claim, entry_point, paying, record, shift
from tests.support.sql import run_sql, value_of
from tests.support.threads import just_before
from tests.support.waiting import eventually

row_locks = pytest.mark.row_locks
postgresql = pytest.mark.postgresql


TABLE = IdempotencyRecord._meta.db_table
HOUR, DAY = 3600, 24 * 3600
HOLD = {"mode": Lease(on_crash="hold")}


class RecordFactory(factory.django.DjangoModelFactory[IdempotencyRecord]):
    """A record that no run has made: completed, without a body, which expires
    tomorrow.
    """

    class Meta:
        model = IdempotencyRecord

    class Params:
        held = factory.Trait(
            mode="lease",
            hold_on_crash=True,
            status=Status.FAILED,
            on_hold=True,
            response_status=None,
            response_headers=None,
        )

    scope = "s"
    key = factory.Sequence("k{}".format)
    id = factory.LazyAttribute(lambda record: record_id(record.scope, record.key))
    method = "POST"
    path = "/pay/"
    fingerprint = bytes(32)
    mode = "atomic"
    status = Status.COMPLETED
    created_at = factory.LazyFunction(lambda: datetime.now(UTC))
    updated_at = factory.SelfAttribute("created_at")
    expires_at = factory.LazyAttribute(
        lambda record: record.created_at + timedelta(days=1)
    )
    purge_at = factory.SelfAttribute("expires_at")
    response_status = 200
    response_headers = factory.LazyFunction(list)


def dead(key="k", *, since=HOUR, **policy):
    """A key whose owner went no further than its claim, and whose lease ran out so long
    ago.
    """
    claimed = claim(key, policy=Policy(**policy))
    shift(key, locked_at=-since - 0.3, locked_until=-since)
    return claimed


def done(key="k", *, purge_at=-HOUR, expires_at=-HOUR, **policy):
    """A key with an answer, whose times are so many seconds from now."""
    assert entry_point(paying, **policy)(key).status_code == 201
    shift(key, expires_at=expires_at, purge_at=max(purge_at, expires_at))


def settled(key, verdict, **policy):
    """A key whose run ended so."""
    policy = Policy(**policy)
    with engine.execution(claim(key, policy=policy), policy) as run:
        run.verdict = verdict


def work_for_all():
    """One record for each pass."""
    dead("stuck")
    done("due")
    done("audit_retention", purge_at=HOUR)


def all_done():
    stuck, due, kept = map(record, ("stuck", "due", "audit_retention"))
    return stuck.status == "failed" and due is None and kept.response_body is None


def keys(**condition):
    return set(
        IdempotencyRecord.objects.filter(**condition).values_list("key", flat=True)
    )


LOCKING = "SELECT .* FOR (NO KEY )?UPDATE"
# not the one that only tries whether it can write
CHANGING = r"UPDATE (?!.* SET .updated_at. = .*\..updated_at.)"


def one_batch(work, *args, **bounds):
    """What the first batch of a pass has done."""
    return work(*args, **bounds, go_on=lambda _swept: False)


def sums(work, **bounds):
    """The sum of what a pass has done, after each batch."""
    found = []
    last = work(**bounds, go_on=lambda swept: found.append(swept) or True)
    return [*found, last]


def fill(count, *, purge_at):
    """So many answers, the oldest of them due in ``purge_at`` seconds, the others a
    second apart.
    """
    RecordFactory.reset_sequence()
    IdempotencyRecord.objects.bulk_create(
        RecordFactory.build(
            id=uuid4(), created_at=ahead(-DAY), expires_at=ahead(purge_at + number)
        )
        for number in range(count)
    )


# VACUUM keeps what a session with an older snapshot may see, and autovacuum's ANALYZE,
# of whatever table, has one; its VACUUM does not count.
SNAPSHOTS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND (backend_type = 'client backend' OR query LIKE 'autovacuum: %ANALYZE %')
    AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
"""


def vacuum():
    """Once no session that an earlier test had keeps what that has left."""
    eventually(lambda: not value_of(SNAPSHOTS))
    run_sql(f"VACUUM {TABLE}")


@contextmanager
def renewed_before_the_update(
    claimed: Claimed, policy: Policy
) -> Iterator[list[Future[set[UUID]]]]:
    """Try, in another thread, to renew a claim's lease just before this thread's
    UPDATE; what came of it.
    """
    renewals: list[Future[set[UUID]]] = []

    def renew() -> set[UUID]:
        try:
            return store_for(policy).renew([claimed])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:

        def try_to_renew() -> None:
            renewals.append(pool.submit(renew))
            wait(renewals, timeout=0.5)  # long enough, if it were let

        with just_before(CHANGING, try_to_renew):
            yield renewals


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE read_only_sql_transaction USING MESSAGE = 'no updates here'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON django_idempotency_record
    EXECUTE FUNCTION refuse()
"""


@contextmanager
def updates_refused() -> Iterator[None]:
    run_sql(REFUSE)
    try:
        yield
    finally:
        run_sql("DROP FUNCTION IF EXISTS refuse CASCADE")
