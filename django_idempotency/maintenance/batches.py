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
# On PostgreSQL, a statement of maintenance may take so many seconds, whatever the role's statement_timeout says.
LONGEST = 600
OTHER_PARAMETERS = 50


def sum_of(batches: Iterator[T]) -> T:
    """Run all of ``batches``, and add up what came of them."""
    return reduce(add, batches)


def in_transaction(using: str, batch: Callable[[], T]) -> T:
    """``batch`` in a transaction of its own, begun again where another one was in its way."""
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
    """What tells whether ``max_seconds`` are over; never, if that is ``None``."""
    began = time.monotonic()
    return lambda: max_seconds is not None and time.monotonic() - began >= max_seconds


def batch_size(batch: int, using: str) -> int:
    """``batch``, or as many ids as the database takes in a statement beside its other parameters."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1.")
    most = connections[using].features.max_query_params
    return batch if most is None else min(batch, most - OTHER_PARAMETERS)
