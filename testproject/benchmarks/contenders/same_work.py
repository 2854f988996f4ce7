"""Unprotected, but with about as much work as a claim by record, without a claim: what being busier costs.

Three statements take the server as long as a claim, and the application as much processor time as the engine.
"""

from __future__ import annotations

import time
from typing import Any

from testproject.benchmarks.contenders import Contender

STATEMENTS = 3
ROWS = 900  # that each statement generates and counts: about 0.13 ms
SECONDS = 0.0005  # of the processor, besides what the statements take


def protect(view: Any) -> Any:
    from django.db import connection

    class Busy(view):  # type: ignore[misc]
        def post(self, request: Any) -> Any:
            with connection.cursor() as cursor:
                for _ in range(STATEMENTS):
                    cursor.execute(f"SELECT count(*) FROM generate_series(1, {ROWS})")
            end = time.thread_time() + SECONDS
            while time.thread_time() < end:
                pass
            return super().post(request)

    return Busy.as_view()


CONTENDER = Contender(title="as much work, no claim", protect=protect)
