"""A TCP proxy in front of a database or a broker. A test can cut its connections for
good, at a COMMIT or a claim.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from itertools import pairwise
from threading import Event, Thread
from typing import Any

# The message that commits, as PostgreSQL's and MariaDB's clients send it: alone, or at
# the end of a pipeline.
COMMITS = (
    b"Q\0\0\0\x0bCOMMIT\0",
    b"P\0\0\0\x0e\0COMMIT\0",
    b"\x07\0\0\0\x03COMMIT",
    b"\x07\0\0\0\x03commit",
)


CLAIMS = (b"django_idempotency_claim",)
MEMOS = (b"WITH own AS",)  # of steps
BEGINS = (b"P\0\0\0\x0d\0BEGIN\0",)  # of a pipeline
POOLERS_ERROR = b"SFATAL\0VFATAL\0C08P01\0Mserver conn crashed?\0\0"
# and a byte for the transaction's status: the end of what answers a pipeline
READY = b"Z\0\0\0\x05"


class Moment(Enum):
    BEFORE = auto()  # the server never hears of it
    HALFWAY = auto()  # the server executes all but the last statement that goes with it
    AFTER = auto()  # the server has done it, but its answer is lost
    UNSYNCED = auto()  # the same, but all of the answer arrives except for its end
    CRASHED = auto()  # the same, but a pooler, which has lost the answer, says so


class Cut(Enum):
    BEFORE_COMMIT = COMMITS, Moment.BEFORE
    HALFWAY_TO_COMMIT = COMMITS, Moment.HALFWAY
    AFTER_COMMIT = COMMITS, Moment.AFTER
    BEFORE_SYNC_OF_COMMIT = COMMITS, Moment.UNSYNCED
    AFTER_COMMIT_AT_A_POOLER = COMMITS, Moment.CRASHED
    BEFORE_BEGIN = BEGINS, Moment.BEFORE
    HALFWAY_FROM_BEGIN = BEGINS, Moment.HALFWAY
    AFTER_BEGIN = BEGINS, Moment.AFTER
    BEFORE_SYNC_OF_BEGIN = BEGINS, Moment.UNSYNCED
    AFTER_CLAIM = CLAIMS, Moment.AFTER
    AFTER_MEMO = MEMOS, Moment.AFTER

    @property
    def moment(self) -> Moment:
        return self.value[1]

    def is_at(self, message: bytes) -> bool:
        return any(part in message for part in self.value[0])


class Proxy:
    """``away`` refuses every connection; ``cut`` says where the next transaction, or
    claim, is to be cut off.

    ``freeze`` holds back what is sent either way, on old connections and new ones,
    until ``thaw``. ``swallow`` does so for good on the newest connection: neither end
    is told that it leads nowhere.

    ``meanwhile`` is called when the server has lost the client before a COMMIT, and the
    client does not know it yet.
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
            self.wires.append(wire := Wire(self, client, server))
            wire.start()  # whoever can use it finds it among the wires
            if self.away:  # since just now
                wire.close()

    def _upstream(self) -> socket.socket:
        host, port = self.upstream
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server


class Wire:
    """One connection through the proxy."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, server: socket.socket
    ) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.answer_is_lost = self.swallowed = self.unsynced = self.pooled = False
        self.client_may_know = Event()
        self.client_may_know.set()

    def start(self) -> None:
        for pump in (self._ask, self._answer):
            Thread(target=pump, daemon=True).start()

    def _ask(self) -> None:
        with self._open():
            while message := self.client.recv(65536):
                cut = self.proxy.takes_cut(message)
                moment = cut and cut.moment
                if moment in (Moment.BEFORE, Moment.HALFWAY):
                    self.client_may_know.clear()
                    if moment is Moment.HALFWAY:
                        self.server.sendall(message[: start_of_last(message)])
                    close(self.server)
                    self.proxy.meanwhile()
                    self.client_may_know.set()
                    return
                self.answer_is_lost, self.unsynced = (
                    moment is Moment.AFTER,
                    moment is Moment.UNSYNCED,
                )
                self.pooled = moment is Moment.CRASHED
                self._pass(message, self.server)

    def _answer(self) -> None:
        with self._open():
            while (message := self.server.recv(65536)) and not self.answer_is_lost:
                cut = (self.unsynced or self.pooled) and message[-6:-1] == READY
                if cut and self.pooled:
                    message = (
                        b"E"
                        + (len(POOLERS_ERROR) + 4).to_bytes(4, "big")
                        + POOLERS_ERROR
                    )
                self._pass(
                    message[:-6] if cut and self.unsynced else message, self.client
                )
                if cut:
                    return

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
        self.client_may_know.wait(120)
        for end in (self.client, self.server):
            close(end)


def start_of_last(pipeline: bytes) -> int:
    """Where the last statement of a pipeline starts: with a Parse, or with a Bind of
    one that is prepared.
    """
    at, kinds = 0, [(b"", 0)]
    while at < len(pipeline):
        kinds.append((pipeline[at : at + 1], at))
        at += 1 + int.from_bytes(pipeline[at + 1 : at + 5], "big")
    pairs = pairwise(kinds)
    return [
        at
        for (before, _at), (kind, at) in pairs
        if kind == b"P" or (kind == b"B" and before != b"P")
    ][-1]


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
