"""What the database itself holds of the record's rules: constraints, moves, indexes,
migrations.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from itertools import product
from uuid import uuid4

import pytest
from django.apps.registry import Apps
from django.core.management import call_command
from django.core.management.sql import emit_post_migrate_signal
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from django_idempotency import engine
from django_idempotency.models import (
    DatabaseNow,
    IdempotencyRecord,
    Status,
    check_move,
)
from django_idempotency.stores import postgresql
from django_idempotency.stores.claim_function import FUNCTION, can_claim
from django_idempotency.values.exceptions import IllegalMove
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Claimed, Operation
from django_idempotency.values.policy import Policy
from tests.support.sql import run_sql, sqlite_says

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLAIM = {"token": uuid4(), "locked_at": NOW, "locked_until": NOW}
NO_CLAIM = dict.fromkeys(CLAIM)
RESPONSE = {
    "response_status": 201,
    "response_headers": [["A", "b"]],
    "response_body": b"\0",
}
NO_RESPONSE = dict.fromkeys(RESPONSE)
TABLE = IdempotencyRecord._meta.db_table


def columns(status, **changed):
    """A record as it has to be in this status, but for what is ``changed``."""
    claim = CLAIM if status in ("started", "processing") else NO_CLAIM
    answer = RESPONSE if status == "completed" else NO_RESPONSE
    times = dict.fromkeys(("created_at", "updated_at", "expires_at", "purge_at"), NOW)
    request = {
        "scope": "s",
        "key": "k",
        "method": "POST",
        "path": "/",
        "fingerprint": b"f" * 32,
        "mode": "atomic",
    }
    return (
        {"id": record_id("s", "k"), "status": status}
        | request
        | times
        | claim
        | answer
        | changed
    )


def inserted(values):
    return _refusal(
        lambda: IdempotencyRecord.objects.bulk_create([IdempotencyRecord(**values)])
    )


def updated(values):
    IdempotencyRecord.objects.bulk_create(
        [IdempotencyRecord(**columns(values["status"]))]
    )
    del values["id"]  # by which Citus distributes the records
    return _refusal(lambda: IdempotencyRecord.objects.update(**values))


def _refusal(write):
    """The constraint by which the database refused it; ``None`` if it took it."""
    try:
        with transaction.atomic():
            write()
    except IntegrityError as error:
        # A shard's constraint has the number of the shard in its name, too.
        return re.search(r"idempotency_record_([a-z_]+[a-z])", str(error))[1]
    return None


@pytest.fixture(params=[inserted, updated], ids=["insert", "update"])
def refusal(request, db):
    """Writes columns by a statement that no Python of ours looks at; which constraint
    refused it.
    """
    return lambda status, **changed: request.param(columns(status, **changed))


def test_an_unknown_status_or_mode_is_refused(db):
    assert inserted(columns("completed") | {"status": "done"})
    assert inserted(columns("completed", mode="optimistic")) == "mode"


@pytest.mark.parametrize("status", Status.values)
@pytest.mark.parametrize("has", list(product([True, False], repeat=3)))
def test_a_claim_is_there_whole_exactly_while_started_or_processing(
    refusal, status, has
):
    claim = {
        name: value if there else None
        for (name, value), there in zip(CLAIM.items(), has, strict=True)
    }
    whole, none = all(has), not any(has)
    legal = whole if status in ("started", "processing") else none
    assert refusal(status, **claim) == (None if legal else "claim")


@pytest.mark.parametrize("status", Status.values)
@pytest.mark.parametrize("has", list(product([True, False], repeat=3)))
def test_a_response_is_there_exactly_where_it_must_be(refusal, status, has):
    """One without its body is an answer (streamed, or too large); a part of one is
    none.
    """
    answer = {
        name: value if there else None
        for (name, value), there in zip(RESPONSE.items(), has, strict=True)
    }
    answered, none = has[:2] == (True, True), not any(has)
    legal = {
        "started": none,
        "processing": none,
        "completed": answered,
        "failed": answered or none,
    }
    assert refusal(status, **answer) == (None if legal[status] else "response")


@pytest.mark.parametrize(
    ("status", "response"), [*product(Status.values, [{}]), ("failed", RESPONSE)]
)
def test_only_a_failure_without_a_response_can_be_put_on_hold(
    refusal, status, response
):
    legal = status == "failed" and not response
    assert refusal(status, on_hold=True, **response) == (None if legal else "on_hold")


@pytest.mark.parametrize(
    "wrong", [{"purge_at": NOW - timedelta(seconds=1)}, {"attempts": 0}], ids=str
)
def test_attempts_start_at_one_and_an_audit_copy_ends_with_the_key_at_least(
    refusal, wrong
):
    assert refusal("completed", **wrong) == "sane"


def test_a_path_may_be_as_long_as_any_real_url(refusal):
    assert (
        refusal("completed", path="/" + "x" * 20_000, scope="s" * 5000, key="k" * 255)
        is None
    )


LEGAL = {
    *product(["started"], ["processing", "failed"]),
    *product(["processing"], ["processing", "completed", "failed"]),
    *product(["failed"], ["processing"]),
}
LEGAL_BY_DECISION = {
    ("started", "completed"),
    ("failed", "completed"),
    ("failed", "failed"),
}
LEGAL_ONCE_EXPIRED = {("completed", "processing")}


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize(("before", "after"), list(product(Status, Status)))
def test_a_record_makes_exactly_the_moves_of_the_table(before, after, expired, decided):
    legal = (
        LEGAL
        | (LEGAL_ONCE_EXPIRED if expired else set())
        | (LEGAL_BY_DECISION if decided else set())
    )
    if (before, after) in legal:
        check_move(before, after, expired=expired, decided=decided)
    else:
        with pytest.raises(IllegalMove, match=f"from {before} to {after}"):
            check_move(before, after, expired=expired, decided=decided)


def test_an_unknown_status_can_not_move():
    with pytest.raises(ValueError, match="done"):
        check_move("done", "processing")


def test_exactly_the_wanted_key_is_found_in_every_scope(db):
    for scope, key in product(("user:1", "user:2"), ("k", "kk")):
        assert not inserted(
            columns("completed", id=record_id(scope, key), scope=scope, key=key)
        )
    found = IdempotencyRecord.objects.with_key("k")
    assert sorted(found.values_list("scope", "key")) == [
        ("user:1", "k"),
        ("user:2", "k"),
    ]


def migrate(target):
    call_command("migrate", "django_idempotency", *target, verbosity=0)


@pytest.mark.not_on_citus
@pytest.mark.usefixtures("transactional_db")
def test_the_migrations_go_back_and_forth_again():
    try:
        migrate(["zero"])
        assert TABLE not in connection.introspection.table_names()
    finally:
        migrate([])
    assert inserted(columns("completed")) is None


@pytest.mark.postgresql
def test_storage_parameters_are_set(db):
    parameters = import_module(
        "django_idempotency.migrations.0001_create_record"
    ).PARAMETERS
    ((options,),) = run_sql(
        "SELECT reloptions FROM pg_class WHERE oid = %s::regclass", [TABLE]
    )
    assert options == [f"{name}={value}" for name, value in parameters.items()]


@pytest.mark.postgresql
def test_besides_the_primary_key_there_are_only_partial_indexes(db):
    definitions = dict(
        run_sql(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", [TABLE]
        )
    )
    primary = definitions.pop("django_idempotency_record_pkey")
    assert primary.endswith("(id)")
    # PostgreSQL casts here or there, by whether the table was ever partitioned.
    plain = partial(re.sub, r"::(character varying|text)(\[\])?|[()]", "")
    assert {
        name: plain(definition.partition("USING ")[2])
        for name, definition in definitions.items()
    } == {
        "idempotency_record_reap": (
            "btree locked_until WHERE status = ANY ARRAY['started', 'processing'] OR"
            " on_hold"
        ),
        "idempotency_record_bodies": (
            "btree expires_at WHERE purge_at > expires_at AND response_body IS NOT NULL"
        ),
        "idempotency_record_undecided": (
            "btree on_hold, updated_at WHERE response_status IS NULL AND status ="
            " 'failed'"
        ),
        "idempotency_record_purge": (
            "btree purge_at WHERE status = ANY ARRAY['completed', 'failed']"
        ),
    }


def test_the_migrations_match_the_models(db):
    call_command(
        "makemigrations", "django_idempotency", check=True, dry_run=True, verbosity=0
    )


def after_migrate(**options):
    emit_post_migrate_signal(verbosity=0, interactive=False, db="default", **options)


class Nowhere:
    def allow_migrate(self, db, app_label, **hints):
        return False


@pytest.mark.postgresql
def test_tables_made_without_migrations_get_the_claim_function(transactional_db):
    run_sql("DROP FUNCTION django_idempotency_claim")
    try:
        with override_settings(DATABASE_ROUTERS=[Nowhere()]):
            after_migrate()
        assert not can_claim(connection), "the database is not for the records"
    finally:
        after_migrate()
    assert can_claim(connection)
    assert isinstance(engine.claim(Operation("s", "k", bytes(32)), Policy()), Claimed)


@pytest.mark.postgresql
def test_a_function_that_is_there_is_left_as_it_is(transactional_db):
    """Whoever migrates later may not be the one who made it."""
    version = "SELECT xmin FROM pg_proc WHERE proname = 'django_idempotency_claim'"
    before = run_sql(version)
    after_migrate()
    assert run_sql(version) == before


# By the digest of its parameters and columns. Never change a line of a release: take a
# new name, and add it.
CLAIM_FUNCTIONS = {"django_idempotency_claim": "2a570be9b34e9faa"}


def test_the_claim_functions_name_tells_its_signature():
    """A connection that has it prepared could not call it with others (SQLSTATE
    0A000).
    """
    name, columns = re.search(
        r"FUNCTION (\w+)\(\n(.*?)\n\)\nLANGUAGE", FUNCTION, re.DOTALL
    ).groups()
    assert name in postgresql.CLAIM
    digest = hashlib.sha256(" ".join(columns.split()).encode()).hexdigest()[:16]
    assert CLAIM_FUNCTIONS.get(name) == digest


@pytest.mark.postgresql
def test_the_function_is_not_created_in_a_database_without_tables(transactional_db):
    run_sql("CREATE SCHEMA elsewhere; SET search_path = elsewhere")
    try:
        after_migrate(apps=Apps())
        assert can_claim(connection)
    finally:
        run_sql("RESET search_path; DROP SCHEMA elsewhere")


@pytest.mark.parametrize("second", ["12:00:05", "12:00:05.120000"])
def test_sqlite_tells_the_time_as_django_writes_it(second):
    """SQLite compares text, and its own "12:00:05.000" is more than "12:00:05"."""
    time, _parameters = DatabaseNow().as_sqlite(None, connection)
    assert sqlite_says(time, f"2026-11-29 {second}") == f"2026-11-29 {second}"
