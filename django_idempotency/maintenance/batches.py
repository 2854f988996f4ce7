"""Batches, each a short transaction of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import TypeVar

from django.db import DatabaseError, connections, transaction

from django_idempotency.stores.errors import is_conflict

T = TypeVar("T")

ATTEMPTS = 5
# The limit in seconds for one statement of maintenance on PostgreSQL, whatever the role's statement_timeout is.
LONGEST = 600
OTHER_PARAMETERS = 50


def sum_of(batches: Iterator[T]) -> T:
    """Run all ``batches`` and return the sum of their results."""
    return reduce(add, batches)


def in_transaction(using: str, batch: Callable[[], T]) -> T:
    """Run ``batch`` in a transaction of its own, and run it again after a conflict with another transaction."""
    for _attempt in range(ATTEMPTS - 1):
        try:
            return _run(using, batch)
        except DatabaseError as error:
            if not is_conflict(error):
                raise
    return _run(using, batch)


def _run(using: str, batch: Callable[[], T]) -> T:
    with transaction.atomic(using=using, durable=True):
        if connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:
                cursor.execute(f"SET LOCAL statement_timeout = '{LONGEST}s'")
        return batch()


def deadline(max_seconds: float | None) -> Callable[[], bool]:
    """Return a function that tells whether ``max_seconds`` have passed. With ``None``, they never have."""
    began = time.monotonic()
    return lambda: max_seconds is not None and time.monotonic() - began >= max_seconds


def batch_size(batch: int, using: str) -> int:
    """Return ``batch``, but at most as many ids as a statement of the database takes beside its other parameters."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1.")
    most = connections[using].features.max_query_params
    return batch if most is None else min(batch, most - OTHER_PARAMETERS)
