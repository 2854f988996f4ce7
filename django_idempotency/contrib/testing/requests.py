"""Send a request with a key as clients do in practice: again, after its response was lost."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from typing import Any

from django.db import connections

from django_idempotency.conf import conf
from django_idempotency.contrib.testing.comparison import (
    Effects,
    Observed,
    changes,
    code,
    described,
    differences,
    differences_of_headers,
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
    call = Call(client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore)
    retry = replace(call, client=_with_cookies_of_now(client))
    before = call.observe()
    response = call.send()
    once = call.observe()
    if before == once:
        raise AssertionError(
            f"{call} had no visible effect; pass what it changes as effects=…. Its response: {described(response)}"
        )
    again = retry.send()
    faults = [
        *(f"took effect again: {line}" for line in changes(once, call.observe())),
        *differences(response, again),
        *differences_of_headers(response, again, ignore_headers),
    ]
    if faults:
        raise AssertionError("\n".join([f"{call} was sent again with its key:", *(f"  {line}" for line in faults)]))
    return response


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

    def __str__(self) -> str:
        return f"{self.method.upper()} {self.path}"

    def send(self) -> Any:
        headers = {**(self.options.get("headers") or {}), conf().header: f'"{self.key}"'}
        body = {} if self.data is None else {"data": self.data}
        return getattr(self.client, self.method.lower())(self.path, **{**self.options, **body, "headers": headers})

    def observe(self) -> Observed:
        return observe(self.effects, ignore=self.ignore)

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


def _with_cookies_of_now(client: Any) -> Any:
    if not isinstance(getattr(client, "cookies", None), SimpleCookie):
        return client
    other = copy.copy(client)
    other.cookies = copy.deepcopy(client.cookies)
    return other
