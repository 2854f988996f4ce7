"""Have Django's test client send each request twice, and note what differs the second
time.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.test import AsyncClient, Client
from django.test.client import FakePayload

from django_idempotency.contrib.testing.comparison import (
    changes,
    code,
    differences,
    observe,
    policy_at,
)

UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Repetition:
    """A request that was sent twice, and what differed the second time. ``route``: the
    pattern of its URL.
    """

    method: str
    route: str
    path: str
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.method} {self.path} was sent twice:",
                *(f"  {line}" for line in self.differences),
            ]
        )


@contextmanager
def sending_twice(
    *, every: bool = False, ignore: Collection[str] = ()
) -> Iterator[list[Repetition]]:
    """Have ``Client``, ``APIClient`` and ``AsyncClient`` send unsafe requests with a
    key twice; yield what was sent.

    The test gets the first response. A retry must change no rows and send no mail, and
    get the same status and body. Inside the transaction of a test case, what the second
    request did is rolled back, and its queries are not counted. A request whose first
    response is an error (400 and above) is sent once, because it is a matter of policy
    whether a retry runs it again.

    ``every``: give a key to requests without one, unless the view refuses one from an
    anonymous caller. ``ignore``: labels of models whose rows are not effects. Requests
    of other threads are left alone.
    """
    found: list[Repetition] = []
    send, send_async = Client.request, AsyncClient.request
    Client.request = _twice(send, found, every, ignore)  # type: ignore[method-assign]
    AsyncClient.request = _twice_async(  # type: ignore[method-assign]
        send_async, found, every, ignore
    )
    try:
        yield found
    finally:
        Client.request = send  # type: ignore[method-assign]
        AsyncClient.request = send_async  # type: ignore[method-assign]


def _twice(
    send: Any, found: list[Repetition], every: bool, ignore: Collection[str]
) -> Any:
    """Return ``Client.request`` that sends twice."""
    thread = threading.get_ident()

    @wraps(send)
    def request(client: Client, **sent: Any) -> Any:
        sent = client.defaults | sent
        path, method = sent.get("PATH_INFO", "/"), sent.get("REQUEST_METHOD", "GET")
        in_body = not (header := policy_at(path, method).key.meta_name)
        stated = every if in_body else header in sent
        wanted = (
            method in UNSAFE and (stated or every) and threading.get_ident() == thread
        )
        payload = sent.get("wsgi.input", FakePayload())
        # a body that a test made itself may not be read
        if not wanted or not isinstance(payload, FakePayload):
            return send(client, **sent)
        body = payload.read()

        def send_again(**key: str) -> Any:
            return send(client, **sent | key | {"wsgi.input": FakePayload(body)})

        key = {} if stated or in_body else {header: f'"{uuid.uuid4()}"'}
        cookies = copy.deepcopy(client.cookies)
        first = send_again(**key)
        if not stated and code(first) == "idempotency_key_anonymous":
            return send_again()
        if first.status_code < 400:
            comparing = _comparing(client, cookies, first, ignore)
            with comparing as second, second.noting():
                second.response = send_again(**key)
            found.append(second.repetition(method, path))
        return first

    return request


def _twice_async(
    send: Any, found: list[Repetition], every: bool, ignore: Collection[str]
) -> Any:
    """Return ``AsyncClient.request`` that sends twice."""

    async def request(client: AsyncClient, **sent: Any) -> Any:
        path, method = sent["path"], sent["method"]
        meta = policy_at(path, method).key.meta_name
        header = meta.removeprefix("HTTP_").replace("_", "-").lower().encode()
        in_body = not header
        stated = (
            every if in_body else any(name == header for name, _ in sent["headers"])
        )
        if method not in UNSAFE or not (stated or every):
            return await send(client, **sent)
        body = sent.pop("_body_file", FakePayload()).read()

        async def send_again(*key: tuple[bytes, bytes]) -> Any:
            file = {"_body_file": FakePayload(body)}
            headers = [*sent["headers"], *key]
            return await send(client, **sent | file | {"headers": headers})

        key = () if stated or in_body else ((header, f'"{uuid.uuid4()}"'.encode()),)
        cookies = copy.deepcopy(client.cookies)
        first = await send_again(*key)
        if not stated and code(first) == "idempotency_key_anonymous":
            return await send_again()
        if first.status_code < 400:
            comparing = _comparing(client, cookies, first, ignore)
            # in the thread that has the test's connections
            second = await sync_to_async(comparing.__enter__)()
            try:
                with second.noting():
                    second.response = await send_again(*key)
            finally:
                await sync_to_async(comparing.__exit__)(None, None, None)
            found.append(second.repetition(method, path))
        return first

    return request


@dataclass(slots=True)
class _Second:
    """The second request: its response, or what it raised, and what differed."""

    first: Any
    response: Any = None
    differences: tuple[str, ...] = ()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error: the view's, or of a database transaction that it broke."""
        try:
            yield
        except Exception as error:
            self.differences = (f"raised {error!r}",)

    def repetition(self, method: str, path: str) -> Repetition:
        sent = getattr(self.first, "asgi_request", None) or self.first.wsgi_request
        match = sent.resolver_match
        route = f"/{match.route}" if match else path
        return Repetition(method, route, path, self.differences)


@contextmanager
def _comparing(
    client: Any, cookies: Any, first: Any, ignore: Collection[str]
) -> Iterator[_Second]:
    """Have the second request sent inside the block, as a client that did not see the
    ``first`` response, and undo what it did.
    """
    after, client.cookies = client.cookies, cookies
    second = _Second(first)
    try:
        with _unlogged():
            before = observe(ignore=ignore)
            with _undone():
                yield second
                with second.noting():
                    if not second.differences:
                        second.differences = (
                            *differences(first, second.response),
                            *changes(before, observe(ignore=ignore)),
                        )
    finally:
        client.cookies = after


@contextmanager
def _undone() -> Iterator[None]:
    """Roll back what is done on connections that are in a test case's transaction."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            using = connection.alias
            if connection.in_atomic_block and not transaction.get_rollback(using):
                block: Any = transaction.atomic(using=using)
                # as TestCase marks its own: a key may be claimed inside
                block._from_testcase = True
                stack.enter_context(block)
                stack.callback(transaction.set_rollback, True, using=using)
        yield


@contextmanager
def _unlogged() -> Iterator[None]:
    """Remove the queries of this block from the log that ``assertNumQueries``
    counts.
    """
    logs = [
        connection.queries_log for connection in connections.all(initialized_only=True)
    ]
    lengths = list(map(len, logs))
    try:
        yield
    finally:
        for log, length in zip(logs, lengths, strict=True):
            while len(log) > length:
                log.pop()
