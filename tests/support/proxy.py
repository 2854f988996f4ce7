"""A TCP proxy in front of a database or a broker. A test can cut its connections for good, at a COMMIT or a claim."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from threading import Event, Thread
from typing import Any

# The message that commits, as PostgreSQL's and MariaDB's clients send it: alone, since they wait for its answer.
COMMITS = (b"Q\0\0\0\x0bCOMMIT\0", b"\x07\0\0\0\x03COMMIT", b"\x07\0\0\0\x03commit")


CLAIM = b"django_idempotency_claim"


class Cut(Enum):
    BEFORE_COMMIT = auto()  # the server never hears of it
    AFTER_COMMIT = auto()  # the server has committed, but its answer is lost
    AFTER_CLAIM = auto()  # the same for a claim

    def is_at(self, message: bytes) -> bool:
        return CLAIM in message if self is Cut.AFTER_CLAIM else message in COMMITS


class Proxy:
    """``away`` refuses every connection; ``cut`` says where the next transaction, or claim, is to be cut off.

    ``freeze`` holds back what is sent either way, on old connections and new ones, until ``thaw``. ``swallow`` does so
    for good on the newest connection: neither end is told that it leads nowhere.

    ``meanwhile`` is called when the server has lost the client before a COMMIT, and the client does not know it yet.
    """

    def __init__(self, host: str, port: str | int) -> None:
        self.upstream = (host, int(port or 5432))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.away = False
        self.cut: Cut | None = None
        self.away_once_cut = False
        self.cuts = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.wires: list[Wire] = []
        self.refused = 0
        self.flowing = Event()
        self.flowing.set()
        Thread(target=self._accept, daemon=True).start()

    def go_away(self) -> None:
        self.away = True
        for wire in self.wires:
            wire.close()

    def come_back(self) -> None:
        self.away = False
        self.thaw()

    def freeze(self) -> None:
        self.flowing.clear()

    def thaw(self) -> None:
        self.flowing.set()

    def swallow(self) -> None:
        self.wires[-1].swallowed = True

    def takes_cut(self, message: bytes) -> Cut | None:
        """The cut to make at ``message``; each is made once."""
        if self.cut is None or not self.cut.is_at(message):
            return None
        cut, self.cut, self.cuts = self.cut, None, self.cuts + 1
        self.away = self.away_once_cut
        return cut

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _address = self.listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = None if self.away else self._upstream()
        except OSError:  # it is away by itself
            server = None
        if server is None:
            self.refused += 1
            client.close()
        else:
            self.wires.append(Wire(self, client, server))

    def _upstream(self) -> socket.socket:
        host, port = self.upstream
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server


class Wire:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.answer_is_lost = self.swallowed = False
        self.client_may_know = Event()
        self.client_may_know.set()
        for pump in (self._ask, self._answer):
            Thread(target=pump, daemon=True).start()

    def _ask(self) -> None:
        with self._open():
            while message := self.client.recv(65536):
                cut = self.proxy.takes_cut(message)
                if cut is Cut.BEFORE_COMMIT:
                    self.client_may_know.clear()
                    close(self.server)
                    self.proxy.meanwhile()
                    self.client_may_know.set()
                    return
                self.answer_is_lost = cut is not None
                self._pass(message, self.server)

    def _answer(self) -> None:
        with self._open():
            while (message := self.server.recv(65536)) and not self.answer_is_lost:
                self._pass(message, self.client)

    def _pass(self, message: bytes, to: socket.socket) -> None:
        self.proxy.flowing.wait()
        if not self.swallowed:
            to.sendall(message)

    @contextmanager
    def _open(self) -> Iterator[None]:
        with suppress(OSError):
            yield
        self.close()

    def close(self) -> None:
        self.client_may_know.wait(30)
        for end in (self.client, self.server):
            close(end)


def close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def running_proxy(settings: dict[str, Any]) -> Iterator[Proxy]:
    """A proxy in front of the server in ``settings`` (of a connection)."""
    proxy = Proxy(settings["HOST"] or "/var/run/postgresql", settings["PORT"])
    try:
        yield proxy
    finally:
        proxy.listener.close()
        proxy.thaw()
        proxy.go_away()
