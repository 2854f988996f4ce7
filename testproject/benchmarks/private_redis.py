"""A private Redis with its default settings, or the one that ``REDIS_URL`` names."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from testproject.benchmarks import processes

PROGRAM = "redis-server"


@dataclass(frozen=True)
class Redis:
    url: str
    pid: int | None = None

    def cpu(self) -> float:
        return 0.0 if self.pid is None else processes.seconds([self.pid])


@contextmanager
def running() -> Iterator[Redis | None]:
    """Yield a Redis; ``None`` if none is available."""
    if url := os.environ.get("REDIS_URL"):
        yield Redis(url)
    elif not shutil.which(PROGRAM):
        yield None
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield from _started(Path(directory))


def _started(directory: Path) -> Iterator[Redis]:
    address = f"unix://{directory}/socket"
    options = (
        "--port",
        "0",
        "--unixsocket",
        f"{directory}/socket",
        "--dir",
        f"{directory}",
        "--loglevel",
        "warning",
    )
    with subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL) as process:
        try:
            retry = Retry(ConstantBackoff(0.05), 100)
            with redis.Redis.from_url(address, retry=retry) as client:
                client.ping()
            yield Redis(address, process.pid)
        finally:
            process.terminate()
