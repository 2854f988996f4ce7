"""A PostgreSQL that acts as a distributed table: it refuses to lock records of several
shards in one statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from django.db import NotSupportedError, connection

from django_idempotency.contrib.citus import store
from django_idempotency.models import IdempotencyRecord
from tests.support.sql import run_sql

SHARDS = 4
SHARD_OF = """
CREATE FUNCTION get_shard_id_for_distribution_column(text, uuid) RETURNS bigint
LANGUAGE sql AS $$ SELECT ('x' || right($2::text, 1))::bit(4)::integer % 4 $$
"""
LOCKS = re.compile(
    rf"{IdempotencyRecord._meta.db_table}.* FOR (NO KEY )?UPDATE", re.DOTALL
)

NAMES = re.compile(r'\bid"? (?:= |= ANY\(|IN \()$')
EXCLUDES = re.compile(r'NOT \([\w".]+ IN \($')


def shard_of(id: UUID) -> int:
    return id.int % 16 % SHARDS


@contextmanager
def refused_across_shards(patch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """The shards of each statement that has locked records."""
    locked: list[set[int]] = []

    def refuse(execute: Any, sql: str, params: Any, *details: Any) -> Any:
        if LOCKS.search(sql):
            shards = {shard_of(id) for id in _ids(sql, params or ())}
            if len(shards) != 1:
                raise NotSupportedError(
                    "could not run distributed query with FOR UPDATE/SHARE commands"
                )
            locked.append(shards)
        return execute(sql, params, *details)

    run_sql(SHARD_OF)
    try:
        with patch.context() as context, connection.execute_wrapper(refuse):
            context.setattr(store, "_distributed", {"default": True})
            yield locked
    finally:
        run_sql("DROP FUNCTION get_shard_id_for_distribution_column")


def _ids(sql: str, params: Sequence[Any]) -> Iterator[UUID]:
    """Those that the statement names, alone or in a list."""
    named = False
    for before, value in zip(sql.split("%s"), params, strict=False):
        named = (named and before == ", ") or bool(
            NAMES.search(before) and not EXCLUDES.search(before)
        )
        if named:
            # ids are sent as texts, too
            listed = value if isinstance(value, list) else [value]
            yield from (UUID(str(each)) for each in listed)
