"""A process of its own that counts what its requests do. It writes the counts every so
many seconds, and can be killed.

``python -m tests.contrib.dashboard.counting_process SECONDS WINDOW`` reads lines of a
key and a number. For each line it sends that many requests with the key, and answers
with the number. It only watches them if the window is more than 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.databases import environment

ROOT = Path(__file__).parents[3]


class CountingProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def begin(self, key: str, requests: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{key} {requests}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Wait until what was begun is done."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip().isdigit()

    def request(self, key: str, requests: int) -> None:
        self.begin(key, requests)
        self.finish()

    def end(self) -> None:
        """As a process ends that has nothing more to do."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(120) == 0

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def counting(seconds: float, window: float = 0) -> Iterator[CountingProcess]:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.contrib.dashboard.counting_process",
            str(seconds),
            str(window),
        ],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield CountingProcess(process)
        finally:
            process.kill()


def main(seconds: str, window: str) -> None:
    import django

    django.setup()
    from django.test import override_settings

    from django_idempotency.contrib.dashboard import counters, observations
    from django_idempotency.engine import background
    from django_idempotency.http.placement import idempotent
    from tests.contrib.dashboard.test_observing import watched
    from tests.support.callers import SCOPE, paying, post

    counters.FLUSH_EVERY = observations.FLUSH_EVERY = float(seconds)
    # on a busy machine, also at its end
    background.PATIENCE = background.PATIENCE_AT_EXIT = 60.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as gunicorn's workers do
    if float(window):
        override_settings(
            IDEMPOTENCY={"DASHBOARD": {"OBSERVE": float(window)}}
        ).enable()
    protected = watched(idempotent(scope=SCOPE)(paying))
    for line in sys.stdin:
        key, requests = line.split()
        for _request in range(int(requests)):
            assert protected(post(key)).status_code == 201
        print(requests, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
