"""The processor time that processes have used, as Linux reports it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def seconds(pids: Iterable[int]) -> float:
    """Return the seconds that ``pids``, and those of their children that have ended,
    have used so far.
    """
    return (
        sum(sum(map(int, fields[11:15])) for pid in pids if (fields := _stat(pid)))
        / TICK
    )


def family(pid: int) -> list[int]:
    """Return ``pid`` and its children."""
    numbers = (
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()
    )
    return [
        pid,
        *(
            number
            for number in numbers
            if (fields := _stat(number)) and int(fields[1]) == pid
        ),
    ]


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the name, which may hold
    anything; none if the process ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
