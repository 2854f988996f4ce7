"""Have Django's test client send each request twice, and note what differs the second time."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from django.db import connections, transaction
from django.test import Client
from django.test.client import FakePayload

from django_idempotency.conf import conf
from django_idempotency.contrib.testing.comparison import (
    changes,
    code,
    differences,
    observe,
)

UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Repetition:
    """A request that was sent twice, and what differed the second time. ``route``: the pattern of its URL."""

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
    """Have ``Client`` and ``APIClient`` send unsafe requests with a key twice; yield what was sent.

    The test gets the first response. A retry must change no rows and send no mail, and get the same status and body.
    Inside the transaction of a test case, what the second request did is rolled back, and its queries are not counted.
    A request whose first response is an error (400 and above) is sent once, because it is a matter of policy whether a
    retry runs it again.

    ``every``: give a key to requests without one, unless the view refuses one from an anonymous caller. ``ignore``:
    labels of models whose rows are not effects. Requests of other threads are left alone.
    """
    found: list[Repetition] = []
    send, thread = Client.request, threading.get_ident()

    @wraps(send)
    def request(client: Client, **sent: Any) -> Any:
        sent = client.defaults | sent
        stated = conf().meta_name in sent
        wanted = (
            sent.get("REQUEST_METHOD") in UNSAFE
            and (stated or every)
            and threading.get_ident() == thread
        )
        payload = sent.get("wsgi.input", FakePayload())
        if not wanted or not isinstance(
            payload, FakePayload
        ):  # a body that a test made itself may not be read
            return send(client, **sent)
        body = payload.read()

        def send_again(**key: str) -> Any:
            return send(client, **sent | key | {"wsgi.input": FakePayload(body)})

        key = {} if stated else {conf().meta_name: f'"{uuid.uuid4()}"'}
        cookies = copy.deepcopy(client.cookies)
        first = send_again(**key)
        if not stated and code(first) == "idempotency_key_anonymous":
            return send_again()
        if first.status_code < 400:
            after, client.cookies = client.cookies, cookies
            try:
                with _unlogged():
                    differing = _differing(first, lambda: send_again(**key), ignore)
            finally:
                client.cookies = after
            match = first.wsgi_request.resolver_match
            path = sent["PATH_INFO"]
            found.append(
                Repetition(
                    sent["REQUEST_METHOD"],
                    f"/{match.route}" if match else path,
                    path,
                    differing,
                )
            )
        return first

    Client.request = request  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Client.request = send  # type: ignore[method-assign]


def _differing(
    first: Any, send_again: Callable[[], Any], ignore: Collection[str]
) -> tuple[str, ...]:
    before = observe(ignore=ignore)
    with _undone():
        try:
            second = send_again()
            return (
                *differences(first, second),
                *changes(before, observe(ignore=ignore)),
            )
        except (
            Exception
        ) as error:  # the view's, or of a database transaction that it broke
            return (f"raised {error!r}",)


@contextmanager
def _undone() -> Iterator[None]:
    """Roll back what is done on connections that are in a test case's transaction."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and not connection.needs_rollback:
                block: Any = transaction.atomic(using=connection.alias)
                block._from_testcase = (
                    True  # as TestCase marks its own: a key may be claimed inside
                )
                stack.enter_context(block)
                stack.callback(transaction.set_rollback, True, using=connection.alias)
        yield


@contextmanager
def _unlogged() -> Iterator[None]:
    """Remove the queries of this block from the log that ``assertNumQueries`` counts."""
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
