"""Have Django's test clients send each request twice, and note what differs the second time."""

from __future__ import annotations

import asyncio
import copy
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.test import AsyncClient, Client
from django.test.client import FakePayload

from django_idempotency.conf import conf
from django_idempotency.contrib.testing.comparison import Observed, changes, code, differences, observe

UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Repetition:
    """A request that was sent twice, and what differed the second time. ``route``: the pattern of its URL."""

    method: str
    route: str
    path: str
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.method} {self.path} was sent twice:", *(f"  {line}" for line in self.differences)])


@contextmanager
def sending_twice(*, every: bool = False, ignore: Collection[str] = ()) -> Iterator[list[Repetition]]:
    """Have ``Client``, ``AsyncClient`` and ``APIClient`` send unsafe requests with a key twice; yield what was sent.

    The test gets the first response. A retry must change no rows and send no mail, and get the same status and body.
    Inside the transaction of a test case, what the second request did is rolled back, and its queries are not counted.
    A request whose first response is an error (400 and above) is sent once, because it is a matter of policy whether a
    retry runs it again.

    ``every``: give a key to requests without one, unless the view refuses one from an anonymous caller. ``ignore``:
    labels of models whose rows are not effects. Requests of other threads are left alone.
    """
    found: list[Repetition] = []
    doubler = _Doubler(found, every, ignore)
    sync, unsync = Client.request, AsyncClient.request
    Client.request = doubler.around(sync)  # type: ignore[method-assign]
    AsyncClient.request = doubler.around_async(unsync)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Client.request = sync  # type: ignore[method-assign]
        AsyncClient.request = unsync  # type: ignore[method-assign]


class _Doubler:
    def __init__(self, found: list[Repetition], every: bool, ignore: Collection[str]) -> None:
        self.found = found
        self.every = every
        self.ignore = ignore
        self.thread = threading.get_ident()

    def around(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        def request(client: Client, **sent: Any) -> Any:
            sent = _default_key(client) | sent
            twice = self._to_be_sent_twice(sent)
            if twice is None:
                return send(client, **sent)
            cookies = copy.deepcopy(client.cookies)
            first = send(client, **twice.request())
            if twice.is_refused(first):
                return send(client, **twice.request(keyed=False))
            if first.status_code < 400:
                with _cookies(client, cookies), _unlogged():
                    self.found.append(twice.repetition(first, self._repeat(send, client, twice, first)))
            return first

        return request

    def around_async(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        async def request(client: AsyncClient, **sent: Any) -> Any:
            twice = self._to_be_sent_twice(sent)
            if twice is None:
                return await send(client, **sent)
            cookies = copy.deepcopy(client.cookies)
            first = await send(client, **twice.request())
            if twice.is_refused(first):
                return await send(client, **twice.request(keyed=False))
            if first.status_code < 400:
                with _cookies(client, cookies):
                    self.found.append(twice.repetition(first, await self._arepeat(send, client, twice, first)))
            return first

        return request

    def _to_be_sent_twice(self, sent: dict[str, Any]) -> _Twice | None:
        twice = _Twice(sent)
        wanted = twice.method in UNSAFE and (twice.keyed or self.every) and twice.has_readable_body
        if not wanted or (threading.get_ident() != self.thread and not _in_event_loop()):
            return None
        twice.read_body()
        return twice

    def _repeat(self, send: Callable[..., Any], client: Client, twice: _Twice, first: Any) -> list[str]:
        before = self._look()
        with _undone():
            try:
                second = send(client, **twice.request())
                return [*differences(first, second), *changes(before, self._look())]
            except Exception as error:  # the view's, or of a database transaction that it broke
                return [f"raised {error!r}"]

    async def _arepeat(self, send: Callable[..., Any], client: AsyncClient, twice: _Twice, first: Any) -> list[str]:
        before = await sync_to_async(self._look)()
        try:
            second = await send(client, **twice.request())
            return [*differences(first, second), *changes(before, await sync_to_async(self._look)())]
        except Exception as error:
            return [f"raised {error!r}"]

    def _look(self) -> Observed:
        return observe(ignore=self.ignore)


class _Twice:
    """The arguments of ``Client.request()`` (a WSGI environment) or ``AsyncClient.request()`` (an ASGI scope)."""

    def __init__(self, sent: Mapping[str, Any]) -> None:
        self.is_scope = "REQUEST_METHOD" not in sent
        self.sent = sent
        self.method: str = sent.get("method" if self.is_scope else "REQUEST_METHOD", "GET")
        self.path: str = sent.get("path" if self.is_scope else "PATH_INFO", "/")
        self.payload_name = "_body_file" if self.is_scope else "wsgi.input"
        self.header = conf().header.lower().encode()
        self.key = f'"{uuid.uuid4()}"'
        self.body = b""

    @property
    def keyed(self) -> bool:
        if self.is_scope:
            return any(name.lower() == self.header for name, _value in self.sent.get("headers", ()))
        return conf().meta_name in self.sent

    @property
    def has_readable_body(self) -> bool:
        """Whether the body, if there is one, was made by the client."""
        return isinstance(self.sent.get(self.payload_name, FakePayload()), FakePayload)

    def read_body(self) -> None:
        """Read the body, which can be read only once."""
        if self.payload_name in self.sent:
            self.body = self.sent[self.payload_name].read()

    def request(self, *, keyed: bool = True) -> dict[str, Any]:
        """Return the arguments once more, with a key, unless they have one or ``keyed`` is false."""
        made = dict(self.sent)
        if "headers" in made:
            made["headers"] = [*made["headers"]]  # the client adds its cookies to them
        if self.payload_name in made:
            made[self.payload_name] = FakePayload(self.body)
        if keyed and not self.keyed:
            if self.is_scope:
                made["headers"].append((self.header, self.key.encode()))
            else:
                made[conf().meta_name] = self.key
        return made

    def is_refused(self, response: Any) -> bool:
        """Whether a key that was added here is refused, because the caller is anonymous or the view wants none."""
        return not self.keyed and code(response) == "idempotency_key_anonymous"

    def repetition(self, first: Any, differences: list[str]) -> Repetition:
        request: Any = getattr(first, "asgi_request" if self.is_scope else "wsgi_request", None)
        match = getattr(request, "resolver_match", None)
        route = f"/{match.route}" if match else self.path
        return Repetition(self.method, route, self.path, tuple(differences))


def _default_key(client: Client) -> dict[str, Any]:
    """Return the key that the client always sends, as with ``APIClient(headers={"Idempotency-Key": "k"})``."""
    name = conf().meta_name
    return {name: client.defaults[name]} if name in client.defaults else {}


@contextmanager
def _cookies(client: Client | AsyncClient, as_before: Any) -> Iterator[None]:
    """Give the client the cookies from before the first response, and in the end those from after it."""
    after, client.cookies = client.cookies, as_before
    try:
        yield
    finally:
        client.cookies = after


@contextmanager
def _undone() -> Iterator[None]:
    """Roll back what is done on connections that are in a test case's transaction."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and not connection.needs_rollback:
                block: Any = transaction.atomic(using=connection.alias)
                block._from_testcase = True  # as TestCase marks its own: a key may be claimed inside
                stack.enter_context(block)
                stack.callback(transaction.set_rollback, True, using=connection.alias)
        yield


@contextmanager
def _unlogged() -> Iterator[None]:
    """Remove the queries of this block from the log that ``assertNumQueries`` counts."""
    logs = [connection.queries_log for connection in connections.all(initialized_only=True)]
    lengths = list(map(len, logs))
    try:
        yield
    finally:
        for log, length in zip(logs, lengths, strict=True):
            while len(log) > length:
                log.pop()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
