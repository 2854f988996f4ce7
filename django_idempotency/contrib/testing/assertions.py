"""Send a request with a key as clients do in practice: again, after its response was
lost or its process died.

Models are imported where they are used, so that ``testing`` can be imported without
Django's settings.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http.cookies import SimpleCookie
from typing import Any, NoReturn, TextIO

from django.db import connections
from django.db.models import F
from django.test import Client

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
    policy_at,
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
    """Send a request twice with one key. The second must change nothing and get the
    first response, which is returned.

    The second comes from a client that never saw the first response: Django's
    client sends the cookies that it had before. So a view that renews the session
    fails here, unless the old cookie still authenticates.

    ``client``: Django's test client, REST framework's, or a client of httpx or
    requests. ``data`` and ``options``: for the client's method (``content_type``,
    ``format``, ``json``, ``headers`` …). ``key``: by default a new one. ``effects``:
    what the request changes, as a QuerySet or a callable; by default the rows of all
    models, except those whose labels are in ``ignore``, and mail. ``ignore_headers``:
    names of headers that may differ.

    Raises ``AssertionError``, also if the first request had no effect, because then the
    test would show nothing.
    """
    call = Call(
        client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore
    )
    retry = replace(call, client=_with_cookies_of_now(client))
    before = call.observe()
    response = call.send()
    once = call.observe()
    if before == once:
        raise AssertionError(
            f"{call} had no visible effect; pass what it changes as effects=…. Its"
            f" response: {described(response)}"
        )
    again = retry.send()
    faults = [
        *(f"took effect again: {line}" for line in changes(once, call.observe())),
        *differences(response, again),
        *differences_of_headers(response, again, ignore_headers),
    ]
    if faults:
        raise AssertionError(
            "\n".join(
                [
                    f"{call} was sent again with its key:",
                    *(f"  {line}" for line in faults),
                ]
            )
        )
    return response


def crash_after_effect(
    client: Any,
    method: str,
    path: str,
    data: Any = None,
    *,
    key: str | None = None,
    effects: Effects = None,
    ignore: Collection[str] = (),
    patience: float = PATIENCE,
    **options: Any,
) -> Any:
    """Kill the process that serves a request once its view has returned, then retry and
    return the retry's response.

    The first request is served in a child process, made by ``os.fork()``. The child
    ends itself by SIGKILL when the view has returned and its record is about to be
    completed. No handler, ``finally`` or COMMIT runs after that, and the database
    notices by itself. After the retry there must be as many effects as the child saw at
    that moment: fewer were lost, more were done twice.

    In lease mode the lease is ended as if its time had run out, if the record is in a
    database; otherwise the retries wait for it. The retry may also be refused because
    the operation is on hold for an operator.

    Not simulated: a crash of the database or of the machine, and a crash in the middle
    of the view. What is in the memory of the process dies with the child, so
    ``effects`` must look at a database, a file or another process; mails in Django's
    ``outbox`` are not compared. ``effects`` must return a number, or an object that has
    a length.

    Needs ``os.fork()``, a database on a server or in a file, and a test with real
    commits. ``patience``: for how many seconds the retry is repeated while it is
    refused. The other arguments are those of ``assert_idempotent``. Raises
    ``AssertionError``, and ``RuntimeError`` inside the transaction of a test case.
    """
    _expect_commits("crash_after_effect")
    call = Call(
        client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore
    )
    look = partial(_lasting_growth, call, call.observe())
    look()  # effects that can't be measured are refused here, not in the child
    once = _effects_of_a_child(call, look)
    response = call.until_answered(patience)
    grown = look()
    if not once:
        raise AssertionError(
            f"{call} had no visible effect; pass what it changes as effects=…."
        )
    if grown != once:
        raise AssertionError(
            f"{call} crashed after its effects {once}. After the retry there are"
            f" {grown or 'none'}. The response to the retry: {described(response)}"
        )
    if response.status_code >= 400 and code(response) != "idempotency_key_on_hold":
        raise AssertionError(
            f"{call} crashed, and its retry got no final response within {patience:g}"
            f" s: {described(response)}"
        )
    return response


def _lasting_growth(call: Call, before: Observed) -> dict[str, Any]:
    """Return how effects outside of the memory of this process have grown, as it comes
    out of the child's pipe.
    """
    grown = growth(before, call.observe())
    grown.pop("mail.outbox", None)
    return json.loads(json.dumps(grown, default=str))  # type: ignore[no-any-return]


def duplicates_at_once(
    client: Any,
    method: str,
    path: str,
    data: Any = None,
    *,
    count: int = 8,
    key: str | None = None,
    effects: Effects = None,
    ignore: Collection[str] = (),
    patience: float = PATIENCE,
    **options: Any,
) -> Any:
    """Send ``count`` requests with one key at once, each from a thread with connections
    of its own, and return the response that all of them get.

    Before that, the request is sent under another key, to measure what one execution
    adds. A thread repeats its request for ``patience`` seconds while it is refused.

    Needs a test with real commits. ``effects`` must return a number, or an object that
    has a length. The other arguments are those of ``assert_idempotent``. Raises
    ``AssertionError``, and ``RuntimeError`` inside the transaction of a test case.
    """
    _expect_commits("duplicates_at_once")
    if isinstance(client, Client):
        client.handler.load_middleware()  # two threads must not both do it
    key = key or str(uuid.uuid4())
    call = Call(client, method, path, data, options, key, effects, ignore)
    seen = [call.observe()]
    described_alone = described(replace(call, key=str(uuid.uuid4())).send())
    seen.append(call.observe())
    barrier = threading.Barrier(count)

    def send(own: Call) -> Any:
        try:
            barrier.wait(PATIENCE)
            return own.until_answered(patience)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        calls = [
            replace(call, client=_with_cookies_of_now(client)) for _ in range(count)
        ]
        first, *others = pool.map(send, calls)
    once, grown = growth(*seen), growth(seen[1], call.observe())
    faults = [line for other in others for line in differences(first, other)]
    if not once or grown != once or first.status_code in BUSY:
        alone, at_once = once or "nothing", grown or "nothing"
        faults.append(f"one request added {alone}, the duplicates {at_once}")
    if faults:
        raise AssertionError(
            f"{count} × {call} at once: {'; '.join(dict.fromkeys(faults))}. Response"
            f" to the one request: {described_alone}; to a duplicate:"
            f" {described(first)}"
        )
    return first


def _expect_commits(name: str) -> None:
    if any(
        connection.in_atomic_block
        for connection in connections.all(initialized_only=True)
    ):
        raise RuntimeError(
            f"{name}() needs real commits: TransactionTestCase or"
            " django_db(transaction=True)."
        )


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
        headers = {**(self.options.get("headers") or {})}
        source = policy_at(self.path, self.method).key.source
        if isinstance(source, str):  # else the test puts the key where it belongs
            headers[source] = f'"{self.key}"'
        body = {} if self.data is None else {"data": self.data}
        return getattr(self.client, self.method.lower())(
            self.path, **{**self.options, **body, "headers": headers}
        )

    def observe(self) -> Observed:
        return observe(self.effects, ignore=self.ignore)

    def until_answered(self, patience: float) -> Any:
        """Send the request until a client need not come back, for ``patience`` seconds.
        Return the last response.
        """
        deadline = time.monotonic() + patience
        while True:
            response = self.send()
            waits = (
                response.status_code in BUSY
                and code(response) != "idempotency_key_on_hold"
            )
            if not waits or time.monotonic() > deadline:
                return response
            time.sleep(PAUSE)


def _with_cookies_of_now(client: Any) -> Any:
    if not isinstance(getattr(client, "cookies", None), SimpleCookie):
        return client
    other = copy.copy(client)
    other.cookies = copy.deepcopy(client.cookies)
    return other


# --- A child process that dies --------------------------------------------------------


def _effects_of_a_child(
    call: Call, look: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Have a child process serve the request and die; return what ``look`` showed it
    then.
    """
    # the child must not use them
    for connection in connections.all(initialized_only=True):
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # about a fork beside threads; the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _serve_and_die(call, look, os.fdopen(writing, "w"))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    said = json.loads(output) if output else "the child process ended without output"
    if isinstance(said, dict):
        return said
    raise AssertionError(f"{call}: no view was run under the key: {said}")


def _serve_and_die(
    call: Call, look: Callable[[], dict[str, Any]], pipe: TextIO
) -> NoReturn:
    """Serve the request in this process, and kill the process when the view's verdict
    is about to be carried out.
    """
    from django_idempotency.extending.stores import IdempotencyRecord, Run

    def say(what: dict[str, Any] | str) -> None:
        json.dump(what, pipe)
        pipe.flush()

    def die(run: Run, *args: Any, **kwargs: Any) -> NoReturn:
        grown = look()
        # as if the time of its lease had run out
        if not run.policy.is_atomic and run.store.transactional:
            rows = IdempotencyRecord.objects.using(run.store.name).filter(
                pk=run.claim.id, token=run.claim.token
            )
            rows.update(locked_until=F("locked_at"))
        say(grown)
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit  # not reached

    try:
        Run.end = die  # type: ignore[method-assign, assignment]
        say(f"it got {described(call.send())}")
    except BaseException:  # nothing of the child may get back into the test
        say(traceback.format_exc())
    finally:
        os._exit(0)
