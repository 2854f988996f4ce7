"""Send a request with a key as clients do in practice: again, after its response was lost, or several times at once."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from typing import Any

from django.db import connections
from django.test import Client

from django_idempotency.conf import conf
from django_idempotency.contrib.testing.comparison import (
    Effects,
    Observed,
    changes,
    code,
    described,
    differences,
    differences_of_headers,
    growth,
    observe,
)

# After one of these, a client waits and sends the request again.
BUSY = (409, 425, 429, 503)
PAUSE = 0.05
PATIENCE = 30.0


def assert_idempotent(
    client: Any,
    method: str,
    path: str,
    data: Any = None,
    *,
    key: str | None = None,
    effects: Effects = None,
    ignore: Collection[str] = (),
    ignore_headers: Collection[str] = (),
    **options: Any,
) -> Any:
    """Send a request twice with one key. The second must change nothing and get the first response, which is returned.

    The second comes from a client that never saw the first response: a client of Django's sends the cookies that it had
    before. So a view that renews the session fails here, unless the old cookie still authenticates.

    ``client``: Django's test client, REST framework's, or a client of httpx or requests. ``data`` and ``options``: for
    the client's method (``content_type``, ``format``, ``json``, ``headers`` …). ``key``: by default a new one.
    ``effects``: what the request changes, as a QuerySet or a callable; by default the rows of all models, except those
    whose labels are in ``ignore``, and mail. ``ignore_headers``: names of headers that may differ.

    Raises ``AssertionError``, also if the first request had no effect, because then the test would show nothing.
    """
    call = Call(client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore, ignore_headers)
    retry = replace(call, client=_with_cookies_of_now(client))
    before = call.observe()
    response = call.send()
    once = call.observe()
    if before == once:
        raise AssertionError(
            f"{call} had no visible effect; pass what it changes as effects=…. Its response: {described(response)}"
        )
    again = retry.send()
    changed = changes(once, call.observe())
    _report(
        f"{call} was sent again with its key",
        [*(f"took effect again: {line}" for line in changed), *call.differences(response, again)],
    )
    return response


def duplicates_at_once(
    client: Any,
    method: str,
    path: str,
    data: Any = None,
    *,
    count: int = 8,
    once: Mapping[str, Any] | float | None = None,
    key: str | None = None,
    effects: Effects = None,
    ignore: Collection[str] = (),
    ignore_headers: Collection[str] = (),
    patience: float = PATIENCE,
    **options: Any,
) -> Any:
    """Send ``count`` requests with one key at once, each from a thread with connections of its own.

    Each request is repeated while its response is 409, 425, 429 or 503, for ``patience`` seconds. In the end all of
    them must have the same response, which is returned, and the effects of one execution must be there. ``once``: what
    one execution adds, as a number, or, without ``effects``, by the model's label (``{"shop.Order": 1}``). By default
    it is measured first, by the same request under another key. ``effects`` must return a number, or an object that has
    a length.

    Needs a test with real commits: ``TransactionTestCase``, or ``django_db(transaction=True)``. The other arguments are
    those of ``assert_idempotent``. Raises ``AssertionError``, and ``RuntimeError`` inside the transaction of a test
    case.
    """
    expect_commits("duplicates_at_once")
    if isinstance(client, Client):
        client.handler.load_middleware()  # now, because two threads must not both do it
    call = Call(client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore, ignore_headers)
    expected = {"effects": once} if isinstance(once, int | float) else once
    if expected is None:
        expected = _measured(call)
    before = call.observe()
    responses = _at_once(call, count, patience)
    grown = growth(before, call.observe())
    unanswered = [response for response in responses if response.status_code in BUSY or response.status_code >= 500]
    _report(
        f"{count} × {call} at once",
        [
            *(f"got no final response within {patience:g} s: {described(response)}" for response in unanswered[:1]),
            *([] if grown == expected else [f"one execution adds {expected}, but {grown} were added"]),
            *(line for other in responses[1:] for line in call.differences(responses[0], other)),
        ],
    )
    return responses[0]


@dataclass(frozen=True)
class Call:
    """A request that can be sent again and again, and where its effects are seen."""

    client: Any
    method: str
    path: str
    data: Any
    options: Mapping[str, Any]
    key: str
    effects: Effects
    ignore: Collection[str]
    ignore_headers: Collection[str] = ()

    def __str__(self) -> str:
        return f"{self.method.upper()} {self.path}"

    def send(self) -> Any:
        headers = {**(self.options.get("headers") or {}), conf().header: f'"{self.key}"'}
        body = {} if self.data is None else {"data": self.data}
        return getattr(self.client, self.method.lower())(self.path, **{**self.options, **body, "headers": headers})

    def observe(self) -> Observed:
        return observe(self.effects, ignore=self.ignore)

    def differences(self, first: Any, second: Any) -> list[str]:
        return [*differences(first, second), *differences_of_headers(first, second, self.ignore_headers)]

    def until_answered(self, patience: float) -> Any:
        """Send the request until a client need not come back, for ``patience`` seconds. Return the last response."""
        deadline = time.monotonic() + patience
        while True:
            response = self.send()
            waits = response.status_code in BUSY and code(response) != "idempotency_key_on_hold"
            if not waits or time.monotonic() > deadline:
                return response
            time.sleep(PAUSE)


def expect_commits(name: str) -> None:
    """Raise ``RuntimeError`` inside the transaction of a test case, because other connections can't see into it."""
    if any(connection.in_atomic_block for connection in connections.all(initialized_only=True)):
        raise RuntimeError(f"{name}() needs real commits: TransactionTestCase, or django_db(transaction=True).")


def _report(what: str, faults: Iterable[str]) -> None:
    if lines := list(dict.fromkeys(faults)):
        raise AssertionError("\n".join([f"{what}:", *(f"  {line}" for line in lines)]))


def _with_cookies_of_now(client: Any) -> Any:
    if not isinstance(getattr(client, "cookies", None), SimpleCookie):
        return client
    other = copy.copy(client)
    other.cookies = copy.deepcopy(client.cookies)
    return other


def _measured(call: Call) -> dict[str, Any]:
    before = call.observe()
    response = replace(call, key=str(uuid.uuid4())).send()
    grown = growth(before, call.observe())
    if response.status_code >= 400 or not grown:
        raise AssertionError(
            f"{call} under a key of its own, to measure what it adds, added {grown} and got {described(response)}. If "
            "it can't be sent twice under different keys, pass once=…; if the effects can't be seen, pass effects=…."
        )
    return grown


def _at_once(call: Call, count: int, patience: float) -> list[Any]:
    barrier = threading.Barrier(count)

    def run(client: Any) -> Any:
        try:
            barrier.wait(patience)
            return replace(call, client=client).until_answered(patience)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, [_of_its_own(call.client) for _ in range(count)]))


def _of_its_own(client: Any) -> Any:
    """Return a client for another thread. Django's clients raise what each other's views raise; this one does not."""
    other = _with_cookies_of_now(client)
    if other is not client:
        other.raise_request_exception = False
    return other
