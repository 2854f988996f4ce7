"""New keys at a steady rate, through this package's own store.

Every key is due at a time in a schedule, and is timed from then on, not from when a
client got round to it. So a stall counts for all the keys that fell due meanwhile.
"""

from __future__ import annotations

import multiprocessing
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from django.db import connections

from testproject.benchmarks.clients import percentile
from testproject.benchmarks.records import run_one

Window = tuple[float, float]  # from when until when, by the monotonic clock

CLIENTS = 8
FORK = multiprocessing.get_context("fork")


class Key(NamedTuple):
    """When it was due, by the monotonic clock, and the seconds from then to the claim's
    answer and to the commit.
    """

    due: float
    claim: float
    whole: float


@dataclass
class Load:
    """``keys`` is filled once the load has ended."""

    keys: list[Key] = field(default_factory=list)

    def within(self, windows: Sequence[Window]) -> list[Key]:
        """Return the keys that were due in one of ``windows``."""
        return [
            key
            for key in self.keys
            if any(begun <= key.due < ended for begun, ended in windows)
        ]


@contextmanager
def load(name: str, *, rate: float) -> Iterator[Load]:
    """Run ``rate`` keys a second for as long as the block runs, from processes with a
    connection each.

    The first exception in one of them is raised after the block.
    """
    connections.close_all()
    told, begins, ends = Load(), time.monotonic() + 1, FORK.Value("d", inf)
    reports = []
    for number in range(CLIENTS):
        ours, theirs = FORK.Pipe(duplex=False)
        FORK.Process(
            target=_client, args=(name, number, rate, begins, ends, theirs), daemon=True
        ).start()
        theirs.close()
        reports.append(ours)
    try:
        yield told
    finally:
        ends.value = time.monotonic()
        told.keys += sorted(key for report in reports for key in _received(report))


def _received(report: Connection) -> list[Key]:
    answer = report.recv()
    if isinstance(answer, Exception):
        raise answer
    return [Key(*answer[first : first + 3]) for first in range(0, len(answer), 3)]


def _client(
    name: str, number: int, rate: float, begins: float, ends: Any, report: Connection
) -> None:
    times = array("d")
    try:
        for turn in count(number, CLIENTS):
            due = begins + turn / rate
            time.sleep(max(0.0, due - time.monotonic()))
            if due > ends.value:  # keys that are late still run
                break
            begun = time.monotonic()
            _id, claim = run_one(name)
            times.extend((due, begun - due + claim, time.monotonic() - due))
    except Exception as error:
        report.send(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        report.send(times)


def percentiles(keys: Sequence[Key]) -> dict[str, float]:
    """Return percentiles of claims and of whole runs, in ms. ``longest`` is the slowest
    claim.
    """
    claims, wholes = (
        sorted(getattr(key, part) * 1000 for key in keys) for part in ("claim", "whole")
    )
    return {
        "keys": len(keys),
        "p50": percentile(claims, 50),
        "p99": percentile(claims, 99),
        "longest": claims[-1] if claims else 0.0,
        "whole_p50": percentile(wholes, 50),
        "whole_p99": percentile(wholes, 99),
    }
