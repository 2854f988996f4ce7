"""Where the figures were taken."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from testproject.benchmarks.cluster import SETTINGS, Cluster
from testproject.benchmarks.load import generator


def describe(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return {
        "processor": f"{os.cpu_count()} × {_processor()}",
        "memory": (
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}"
            " GiB"
        ),
        "fdatasync": f"{fsync_time(directory) * 1000:.2f} ms",
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "postgresql": cluster.ask("SHOW server_version")[0],
        "postgresql settings": SETTINGS if cluster.is_private else "as given",
        "load": generator(),
        **{
            name: version(name)
            for name in ("django", "djangorestframework", "psycopg", "gunicorn")
        },
        "commit": _commit(),
        "load average before": round(os.getloadavg()[0], 2),
    }


def fsync_time(directory: Path) -> float:
    """Return the median of the seconds that it takes to sync 8 kB to the disk."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return statistics.median(_fsync(file.fileno()) for _ in range(50))


def _fsync(descriptor: int) -> float:
    os.pwrite(descriptor, bytes(8192), 0)
    begun = time.perf_counter()
    os.fdatasync(descriptor)
    return time.perf_counter() - begun


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip()
