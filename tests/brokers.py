"""Which of the services that some tests need can be reached, and at which address."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

URLS = {
    "rabbitmq": ("CELERY_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672//"),
    "redis": ("REDIS_URL", "redis://127.0.0.1:6379/0"),
}
PORTS = {"amqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379}


def url(broker: str) -> str:
    """The address in the environment, or the usual one on this machine."""
    variable, usual = URLS[broker]
    return os.environ.get(variable) or usual


def reachable(broker: str) -> bool:
    """Whether something listens at the broker's address (decided within a second)."""
    address = urlsplit(url(broker))
    try:
        target = (address.hostname or "127.0.0.1", address.port or PORTS[address.scheme])
        socket.create_connection(target, timeout=1).close()
    except (OSError, KeyError):
        return False
    return True


def how_to_include(broker: str) -> str:
    variable, usual = URLS[broker]
    return f"{variable}={usual} make test"
