"""Drive consumers under faults, with a broker that delivers again whatever was not
acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.faults.payments import NO_TROUBLE, Choose, Ledger, amount, named
from tests.faults.trials import Call, Response
from tests.support.servers import ROOT

MODES = ("atomic", "lease")


@dataclass
class Consumers:
    """A process for each client, started when there is something to deliver, and again
    after it died.
    """

    environment: Mapping[str, str]
    processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)  # they are this process's children

    def deliver(self, client: int, order: Mapping[str, object]) -> tuple[int, object]:
        process = self.processes.get(client) or self._start(client)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            status, result = json.loads(process.stdout.readline() or "null") or _died()
        except (BrokenPipeError, ConnectionError):
            self._end(client)
            raise
        return status, result

    def _start(self, client: int) -> subprocess.Popen[str]:
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        self.processes[client] = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.consumer"],
            cwd=ROOT,
            env=os.environ | self.environment,
            text=True,
            **pipes,
        )
        return self.processes[client]

    def _end(self, client: int) -> None:
        process = self.processes.pop(client)
        process.kill()
        process.communicate()

    def close(self) -> None:
        for client in list(self.processes):
            self._end(client)


def _died() -> tuple[int, object]:
    raise ConnectionError("the consumer died")


@dataclass(frozen=True)
class Messages:
    """``send`` and ``effects`` for ``exercise``."""

    consumers: Consumers
    ledger: Ledger
    choose: Choose
    seed: int

    def send(self, call: Call) -> Response:
        mode = MODES[call.index % 2]
        decide = random.Random(f"{self.seed}:{call.number}:{call.retry}")
        trouble = (
            NO_TROUBLE if call.draining else self.choose(decide, call, mode == "lease")
        )
        payment = {"amount": amount(call), "currency": "eur", "reference": call.key}
        fails = bool(trouble.simulate.get("raise"))
        order = {
            "key": call.key,
            "mode": mode,
            "payment": payment,
            "fails": fails,
            "faults": trouble.faults,
        }
        status, result = self.consumers.deliver(call.client, order)
        told = None if mode == "lease" else amount(call)
        effect = named(result["id"], told) if isinstance(result, dict) else ""
        return Response(status, json.dumps(result).encode(), effect=effect)

    def effects(self, key: str) -> list[str]:
        return [name for name, _kind in self.ledger.entries(key)]
