"""An unreliable way to a server: an HTTP proxy that loses responses, or leaves before
they come, as it is told to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

OF_THE_CONNECTION = {"host", "connection", "accept-encoding", "transfer-encoding"}


@dataclass
class Relay:
    """``plan``: what happens to the next responses; after those, all of them ``pass``.

    ``lose``: the server answers, and the connection breaks. ``cut``: it breaks in the
    middle of the body. ``leave``: it breaks while the server runs the request. A dict
    replaces the response (``status``, ``headers``, ``body``).
    """

    server: str
    url: str = ""
    plan: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    running: list[threading.Thread] = field(default_factory=list)


@contextmanager
def running_relay(server: str) -> Iterator[Relay]:
    relay = Relay(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            relay.keys.append(self.headers.get("Idempotency-Key"))
            relay.bodies.append(body)
            then = relay.plan.pop(0) if relay.plan else "pass"
            if isinstance(then, dict):
                self._send(
                    then["status"], then.get("headers", {}), then.get("body", b"{}")
                )
            elif then == "leave":
                self._leave(body)
            else:
                response = self._forward(body)
                relay.statuses.append(response.status_code)
                self._send(
                    response.status_code, response.headers, response.content, then
                )

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _forward(self, body: bytes) -> httpx.Response:
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in OF_THE_CONNECTION
            }
            if "Content-Length" not in headers:
                headers["Content-Length"] = str(len(body))
            with httpx.Client(trust_env=False, timeout=120) as client:
                return client.request(
                    self.command,
                    relay.server + self.path,
                    headers=headers,
                    content=body,
                )

        def _leave(self, body: bytes) -> None:
            """Send it twice: whichever is refused first shows that the server runs the
            other.
            """
            refused: queue.Queue[int] = queue.Queue()
            threads = [
                threading.Thread(
                    target=lambda: refused.put(self._forward(body).status_code)
                )
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            relay.running += threads
            assert refused.get(timeout=120) == 409
            self._break()

        def _send(
            self, status: int, headers: Any, body: bytes, then: str = "pass"
        ) -> None:
            if then == "lose":
                return self._break()
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in (
                    "content-length",
                    "connection",
                    "transfer-encoding",
                ):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if then == "cut":
                self.wfile.write(body[: len(body) // 2])
                return self._break()
            self.wfile.write(body)
            return None

        def _break(self) -> None:
            self.wfile.flush()
            self.close_connection = True

        def log_message(self, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    relay.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(
        target=httpd.serve_forever, kwargs={"poll_interval": 0.05}
    )
    thread.start()
    try:
        yield relay
    finally:
        for left in relay.running:
            left.join(120)
        httpd.shutdown()
        thread.join()
        httpd.server_close()
