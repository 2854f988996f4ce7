"""Load from outside: wrk if it is installed (Debian's package of that name), otherwise
clients written in Python.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testproject.benchmarks.servers import BODY, PATH, ROOT, Server

SCRIPT = Path(__file__).with_name("keys.lua")


@dataclass(frozen=True)
class Load:
    """What ``clients`` see. Each sends its next request once it has the answer to the
    last. Times are in ms.
    """

    requests: int
    seconds: float
    p50: float
    p99: float
    refused: int
    errors: int

    @property
    def rate(self) -> float:
        """Requests a second that were not refused."""
        return (self.requests - self.refused) / self.seconds


def generator() -> str:
    return "wrk" if shutil.which("wrk") else "python"


def drive(
    server: Server,
    *,
    plan: str,
    clients: int,
    seconds: int,
    work: int = 0,
    run: str = "",
) -> Load:
    with driving(
        server, plan=plan, clients=clients, seconds=seconds, work=work, run=run
    ) as process:
        output, _ = process.communicate()
    return result(output)


@contextmanager
def driving(
    server: Server,
    *,
    plan: str,
    clients: int,
    seconds: int,
    work: int = 0,
    run: str = "",
) -> Iterator[subprocess.Popen[str]]:
    """``run`` is eight hexadecimal digits; the same ones lead to the same keys."""
    url = f"http://127.0.0.1:{server.port}{PATH}" + (f"?work={work}" if work else "")
    if generator() == "wrk":
        command = [
            "wrk",
            "-t1",
            f"-c{clients}",
            f"-d{seconds}s",
            "--timeout",
            "30s",
            "-s",
            str(SCRIPT),
            url,
        ]
    else:
        command = [
            sys.executable,
            "-m",
            "testproject.benchmarks.clients",
            url,
            f"{clients}",
            f"{seconds}",
        ]
    environ = {
        **os.environ,
        "PLAN": plan,
        "BODY": BODY,
        "RUN": run or secrets.token_hex(4),
    }
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def result(output: str) -> Load:
    return Load(**json.loads(output.strip().splitlines()[-1]))
