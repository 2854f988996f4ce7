"""A payment gateway in a process of its own, which remembers what it was asked.

``POST /payouts`` pays out once per ``Idempotency-Key``; ``GET /payouts?reference=R``
says how often it was asked, and how often it paid. With ``X-Fault``, it answers 503 and
does not pay; or it is slow, answers 500 or cuts the connection once it has paid, or
honours no key.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

SLOW = 3  # seconds


class Gateway(ThreadingHTTPServer):
    """Serves on ``listener``, a socket that is bound and listening."""

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(
            listener.getsockname(), GatewayHandler, bind_and_activate=False
        )
        self.socket.close()
        self.socket = listener
        self.lock = Lock()
        self.asked: list[str] = []
        self.paid: dict[str, dict[str, Any]] = {}

    def pay(self, key: str, order: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.asked.append(order.get("reference", ""))
            return self.paid.setdefault(key, {**order, "id": f"po_{uuid.uuid4().hex}"})

    def seen(self, reference: str) -> dict[str, Any]:
        with self.lock:
            effects = [
                payout
                for payout in self.paid.values()
                if payout.get("reference") == reference
            ]
            return {
                "reference": reference,
                "calls": self.asked.count(reference),
                "effects": len(effects),
            }


class GatewayHandler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the caller was killed while it sent the body
            self.close_connection = True
            return
        fault = self.headers.get("X-Fault")
        key = self.headers.get("Idempotency-Key", "").strip('"')
        if fault == "503":
            self.answer(503, {})
            return
        if fault == "nokeys" or not key:
            key = str(uuid.uuid4())
        paid = self.server.pay(key, json.loads(body))
        if fault == "cut":
            self.close_connection = True
        elif fault == "500":
            self.answer(500, {})
        else:
            time.sleep(SLOW if fault == "slow" else 0)
            self.answer(201, paid)

    def do_GET(self) -> None:
        self.answer(
            200,
            self.server.seen(
                parse_qs(urlsplit(self.path).query).get("reference", [""])[0]
            ),
        )

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # the caller may have been killed
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def main(descriptor: int) -> None:
    """Serve on an inherited socket until stdin ends, as it does when the parent process
    ends, however it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    gateway = Gateway(socket.socket(fileno=descriptor))
    Thread(target=gateway.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
