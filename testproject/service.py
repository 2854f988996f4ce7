"""The service as in production: the gateway, and gunicorn with its workers, in
processes of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connections

from testproject import brokers

PATIENCE = 10  # seconds for a process to end by itself


@dataclass(frozen=True)
class Service:
    url: str
    gateway_url: str
    gunicorn: subprocess.Popen[bytes]
    relay: subprocess.Popen[bytes] | None = None
    consumer: subprocess.Popen[bytes] | None = None


def prepare() -> None:
    """Create the tables, with alice, bob and admin in them."""
    call_command("migrate", verbosity=0, interactive=False)
    call_command("seed", verbosity=0)
    connections.close_all()


@contextmanager
def running(
    port: int = 0,
    *,
    workers: int = 2,
    threads: int = 8,
    log: Any = None,
    environ: Mapping[str, str] | None = None,
    code: Path | None = None,
) -> Iterator[Service]:
    """Run the service on ``port`` (0: a free one) for as long as the context is open;
    if given, the one in ``code``.
    """
    environ = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        **(environ or {}),
    }
    kind = environ.get("WORKER_CLASS", "gthread")
    with ExitStack() as stack:
        # Listen before the servers start: no client has to wait for them, and a taken
        # port is an error at once.
        listener = stack.enter_context(
            socket.create_server((settings.HOST, port), backlog=1024)
        )
        back_door = stack.enter_context(
            socket.create_server(("127.0.0.1", settings.GATEWAY_PORT))
        )
        gateway_url = _url(back_door)
        stack.enter_context(
            _process(
                back_door,
                "-m",
                "testproject.gateway",
                f"{back_door.fileno()}",
                env=environ,
            )
        )
        gunicorn = stack.enter_context(
            _process(
                listener,
                *(
                    "-m",
                    "gunicorn",
                    "testproject.wsgi",
                    "--bind",
                    f"fd://{listener.fileno()}",
                    "--no-control-socket",
                ),
                *("--worker-class", kind, "--workers", f"{workers}"),
                *(("--threads", f"{threads}") if kind == "gthread" else ()),
                *("--graceful-timeout", "3", "--log-level", "warning"),
                env={**environ, "GATEWAY_URL": gateway_url},
                cwd=code or settings.BASE_DIR,
                stdout=log,
                stderr=log,
            )
        )
        url = _url(listener)
        # Only the servers hold the sockets now: if they end, a client is refused rather
        # than left waiting.
        listener.close()
        back_door.close()
        on_broker = (
            ["idempotency_consume", "testproject.consumers.receipts"],
            ["idempotency_outbox", "relay"],
        )
        consumer, relay = (
            stack.enter_context(_on_broker(command, environ, log))
            for command in on_broker
        )
        yield Service(url, gateway_url, gunicorn, relay, consumer)


@contextmanager
def _on_broker(
    command: Sequence[str], environ: Mapping[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run a process of its own if ``BROKER_URL`` names a broker that listens; otherwise
    yield ``None``.
    """
    if not brokers.listens(environ.get("BROKER_URL", "")):
        yield None
        return
    with _process(
        None, "-m", "testproject", *command, env=environ, stdout=log, stderr=log
    ) as process:
        yield process


@contextmanager
def _process(
    listener: socket.socket | None, *arguments: str, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, *arguments],
        pass_fds=[listener.fileno()] if listener else [],
        stdin=subprocess.PIPE,
        **{"cwd": settings.BASE_DIR, **options},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"
