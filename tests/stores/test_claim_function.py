"""The claim's function in PostgreSQL: its text in the migration, and the advisory lock
that it takes.
"""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import connection, transaction

import django_idempotency
from django_idempotency import engine
from django_idempotency.stores import store_for
from django_idempotency.stores.claim_function import (
    FUNCTION,
    KEY_LOCKS,
    OWNER_LOCK,
    TABLE_NUMBER,
)
from django_idempotency.values.exceptions import StoreRefused, StoreUnavailable
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Claimed, Operation
from django_idempotency.values.policy import Policy
from tests.support.callers import effects, entry_point, paying
from tests.support.sql import run_sql
from tests.support.threads import in_threads
from tests.support.waiting import eventually, someone_waits_for_a_lock

OPERATION = Operation("s", "k", bytes(32))
LOCKED = [KEY_LOCKS, OPERATION.id]
MIGRATIONS = Path(django_idempotency.__file__).parent / "migrations"


def test_migrations_import_nothing_of_the_package():
    imported = {
        node.module
        for path in MIGRATIONS.glob("0*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert not {
        module for module in imported if module.startswith("django_idempotency")
    }


def test_the_function_takes_the_locks_of_the_statements_beside_it():
    function = "".join(FUNCTION.split())
    for text in (
        f"pg_advisory_xact_lock({KEY_LOCKS}, uuid_hash(new_id))",
        f"owner_lock bigint := {OWNER_LOCK.format(id='new_id')};",
        f"IF table_number <> {TABLE_NUMBER} THEN",
    ):
        assert "".join(text.split()) in function


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "lock", ["uuid_hash_extended(%s, 0)", "uuid_hash(%s)", "1, uuid_hash(%s)"]
)
def test_claims_ignore_the_applications_advisory_locks(
    transactional_db, other_thread, lock
):
    other_thread(run_sql, f"SELECT pg_advisory_lock({lock})", [record_id("s", "k")])
    run_sql("SET lock_timeout = '1s'")
    try:
        assert isinstance(engine.claim(OPERATION, Policy()), Claimed)
    finally:
        run_sql("RESET lock_timeout")


@pytest.mark.postgresql
def test_a_client_frozen_before_its_commit_blocks_nobody(
    transactional_db, other_thread, monkeypatch
):
    monkeypatch.setattr(engine.waiting, "PATIENCE", 0.2)
    frozen = transaction.atomic()
    other_thread(frozen.__enter__)
    try:
        other_thread(run_sql, "SELECT pg_advisory_xact_lock(%s, uuid_hash(%s))", LOCKED)
        with pytest.raises(ExceptionGroup) as raised:
            in_threads(1, lambda _: engine.claim(OPERATION, Policy()))
        assert raised.group_contains(StoreUnavailable)
    finally:
        other_thread(frozen.__exit__, None, None, None)
    assert isinstance(engine.claim(OPERATION, Policy()), Claimed)


@pytest.mark.postgresql
def test_waiting_for_a_claim_leaves_the_lock_timeout_as_it_was(
    transactional_db, other_thread
):
    other_thread(run_sql, "SELECT pg_advisory_lock(%s, uuid_hash(%s))", LOCKED)

    def let_go():
        eventually(someone_waits_for_a_lock)
        connection.close()
        other_thread(run_sql, "SELECT pg_advisory_unlock(%s, uuid_hash(%s))", LOCKED)

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        letting_go = pool.submit(let_go)
        assert isinstance(store_for(Policy()).claim(OPERATION, uuid4()), Claimed)
        letting_go.result(60)
        assert run_sql("SHOW lock_timeout") == [("0",)]


def operation(key):
    return Operation("s", key, bytes(32), "POST", "/")


@pytest.mark.postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("transactional_db")
def test_without_the_function_every_claim_is_refused_until_it_is_there(payer, caplog):
    run_sql("ALTER FUNCTION django_idempotency_claim RENAME TO mislaid")
    try:
        assert (entry_point(paying)("k").status_code, effects()) == (503, 0)
        with pytest.raises(
            StoreRefused,
            match="django_idempotency_claim is missing, or this role may not EXECUTE",
        ):
            engine.claim_many([operation("a"), operation("b")], Policy())
    finally:
        run_sql("ALTER FUNCTION mislaid RENAME TO django_idempotency_claim")
    # One line, not one for every request.
    (said,) = [
        record
        for record in caplog.records
        if getattr(record, "event", "") == "no_function"
    ]
    assert (
        "Run manage.py migrate, or grant EXECUTE. (ProgrammingError 42883)"
        in said.getMessage()
    )
    assert (entry_point(paying)("k").status_code, effects()) == (201, 1)
