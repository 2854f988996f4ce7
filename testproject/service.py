"""The service as it runs for real: the gateway, and gunicorn with its workers, as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connections

PATIENCE = 10  # seconds for a process to end by itself


@dataclass(frozen=True)
class Service:
    url: str
    gateway_url: str
    gunicorn: subprocess.Popen[bytes]


def prepare() -> None:
    """The tables, and alice, bob and admin in them."""
    call_command("migrate", verbosity=0, interactive=False)
    call_command("seed", verbosity=0)
    connections.close_all()


@contextmanager
def running(
    port: int = 0, *, workers: int = 2, threads: int = 8, log: Any = None, environ: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """The service on ``port`` (0: a free one) for as long as the context is open."""
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings", **(environ or {})}
    with ExitStack() as stack:
        # Listening before the servers start: nobody has to wait for them, and a taken port is an error at once.
        door = stack.enter_context(socket.create_server((settings.HOST, port), backlog=1024))
        back_door = stack.enter_context(socket.create_server(("127.0.0.1", settings.GATEWAY_PORT)))
        gateway_url = _url(back_door)
        stack.enter_context(_process(back_door, "-m", "testproject.gateway", f"{back_door.fileno()}", env=environ))
        gunicorn = stack.enter_context(
            _process(
                door,
                *("-m", "gunicorn", "testproject.wsgi", "--bind", f"fd://{door.fileno()}", "--no-control-socket"),
                *("--worker-class", "gthread", "--workers", f"{workers}", "--threads", f"{threads}"),
                *("--graceful-timeout", "3", "--log-level", "warning"),
                env={**environ, "GATEWAY_URL": gateway_url},
                stdout=log,
                stderr=log,
            )
        )
        url = _url(door)
        # Only the servers hold them now: should they end, a client is refused rather than left waiting.
        door.close()
        back_door.close()
        yield Service(url, gateway_url, gunicorn)


@contextmanager
def _process(door: socket.socket, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=settings.BASE_DIR,
        pass_fds=[door.fileno()],
        stdin=subprocess.PIPE,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()


def _url(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"http://{host}:{port}"
