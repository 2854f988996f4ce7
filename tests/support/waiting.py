"""Wait, with a bound, for what another process or thread does; other databases of the
server are not asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import transaction

from tests.support.sql import run_sql

T = TypeVar("T")


def eventually(
    probe: Callable[[], T], *, within: float = 60.0, every: float = 0.02
) -> T:
    """The first true answer of ``probe``; ``TimeoutError`` when there is none within so
    many seconds.
    """
    deadline = time.monotonic() + within
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{probe!r} was still {answer!r} after {within} s")
        threading.Event().wait(every)
    return answer


def wait_for_row_locks() -> None:
    """Return once nobody has a record locked: the server notices a little later that a
    process was killed.
    """
    from django_idempotency.models import IdempotencyRecord

    with transaction.atomic():
        list(IdempotencyRecord.objects.select_for_update().values_list("pk"))


def someone_waits_for_a_lock() -> bool:
    """On PostgreSQL."""
    return bool(
        run_sql(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND"
            " wait_event_type = 'Lock' LIMIT 1"
        )
    )
