"""A record without a partition is refused, and said to be; the CHECKs of partitioning
are told from others.
"""

from __future__ import annotations

import pytest
from django.db import IntegrityError

from django_idempotency import engine
from django_idempotency.contrib.partitions.layout import RETIRED, TABLE, UNTIL
from django_idempotency.stores.errors import store_errors
from django_idempotency.values.exceptions import StoreUnavailable
from tests.stores.contract import ATOMIC, _kept_connection, operation
from tests.support.sql import run_sql

pytestmark = [pytest.mark.usefixtures("transactional_db"), pytest.mark.postgresql]


@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        ("refused", IntegrityError, "refused"),
        (UNTIL, StoreUnavailable, "idempotency_partitions ensure"),
        # another partition may take it, the next time
        (RETIRED, StoreUnavailable, "again and again"),
    ],
)
def test_a_refused_record_is_tried_again_only_where_that_helps(
    constraint, error, message, monkeypatch
):
    """And never on another connection."""
    monkeypatch.setattr(engine.waiting, "PATIENCE", 0.2)
    run_sql(f"ALTER TABLE {TABLE} ADD CONSTRAINT {constraint} CHECK (key <> 'refused')")
    try:
        with _kept_connection(), pytest.raises(error, match=message):
            engine.claim(operation("refused"), ATOMIC)
    finally:
        run_sql(f"ALTER TABLE {TABLE} DROP CONSTRAINT {constraint}")


@pytest.mark.parametrize(
    "refused",
    [
        (
            f"CREATE TEMP TABLE divided (key text, CONSTRAINT {UNTIL} CHECK (false));"
            "INSERT INTO divided VALUES ('the-raw-key')"
        ),
        # no constraint's
        (
            "DO $$ BEGIN RAISE check_violation USING TABLE = 'record', DETAIL ="
            " 'the-raw-key'; END $$"
        ),
    ],
)
def test_a_missing_partition_is_logged_without_the_row(refused, caplog):
    with (
        pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"),
        store_errors(),
    ):
        run_sql(refused)
    (said,) = [
        entry
        for entry in caplog.records
        if getattr(entry, "event", "") == "no_partition"
    ]
    assert (said.levelname, said.record_id) == ("CRITICAL", None)
    assert "23514" in said.getMessage()
    assert "the-raw-key" not in caplog.text


@pytest.mark.plain_table
def test_a_nameless_check_violation_is_not_taken_for_a_missing_partition(caplog):
    """As from a worker of Citus: its code comes, and its text, but neither table nor
    constraint.
    """
    run_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE"
        " check_violation USING MESSAGE = 'passed on'; END $$;CREATE TRIGGER refuse"
        f" BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    try:
        with pytest.raises(IntegrityError, match="passed on"):
            engine.claim(operation(), ATOMIC)
    finally:
        run_sql("DROP FUNCTION refuse CASCADE")
    assert [record.event for record in caplog.records if hasattr(record, "event")] == []
