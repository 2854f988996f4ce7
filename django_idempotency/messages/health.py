"""The health of a runner over HTTP, for the supervisor that restarts it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from django_idempotency.conf import conf
from django_idempotency.messages.runner import Runner


@contextmanager
def health_endpoint(runner: Runner[Any], address: str) -> Iterator[int]:
    """Serve ``/healthz`` (200 or 503) on ``host:port``, and ``/metrics`` if Prometheus
    is on. Yield the port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content_type, body = _answer(runner, self.path)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    host, _colon, port = address.rpartition(":")
    with ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler) as server:
        threading.Thread(
            target=server.serve_forever, name="idempotency-health", daemon=True
        ).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def _answer(runner: Runner[Any], path: str) -> tuple[int, str, bytes]:
    if path == "/healthz":
        state = {
            "healthy": runner.is_healthy,
            "at_work": len(runner.at_work),
            "outcomes": dict(runner.counts),
        }
        return (
            200 if runner.is_healthy else 503,
            "application/json",
            json.dumps(state).encode(),
        )
    if path == "/metrics" and "prometheus" in conf().instrumentation:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest()
    return 404, "text/plain", b"There is /healthz, and /metrics with Prometheus.\n"
