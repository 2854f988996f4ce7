"""Kill a process by SIGKILL after the view's effects and before the completion of its record.

Models are imported where they are used, so that ``testing`` can be imported without Django's settings.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
import uuid
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from django.db import connections
from django.db.models import F

from django_idempotency.contrib.testing.comparison import Effects, code, described, growth
from django_idempotency.contrib.testing.requests import PATIENCE, Call, expect_commits


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
    """Kill the process that serves a request once its view has returned, then retry and return the retry's response.

    The first request is served in a child process, made by ``os.fork()``. The child ends itself by SIGKILL when the
    view has returned and its record is about to be completed. No handler, ``finally`` or COMMIT runs after that, and
    the database notices by itself. After the retry there must be as many effects as the child saw at that moment: if
    there are fewer, some were lost; if there are more, something was done twice.

    In lease mode the lease is ended as if its time had run out, if the record is in a database; otherwise the retries
    wait for it. The retry may also be refused because the operation is on hold for an operator.

    Not simulated: a crash of the database or of the machine, and a crash in the middle of the view. What is in the
    memory of the process dies with the child, so ``effects`` must look at a database, a file or another process; mails
    in Django's ``outbox`` are not compared. ``effects`` must return a number, or an object that has a length.

    Needs ``os.fork()``, a database on a server or in a file, and a test with real commits. ``patience``: for how many
    seconds the retry is repeated while it is refused. The other arguments are those of ``assert_idempotent``. Raises
    ``AssertionError``, and ``RuntimeError`` inside the transaction of a test case.
    """
    expect_commits("crash_after_effect")
    call = Call(client, method, path, data, options, key or str(uuid.uuid4()), effects, ignore)
    before = call.observe()

    def look() -> dict[str, Any]:
        return _outside(growth(before, call.observe()))

    look()  # effects that can't be measured are refused here, not in the child
    death = _served_by_a_child(call, look)
    death.end_lease()
    response = call.until_answered(patience)
    once, grown = death.grown, look()
    if not once:
        raise AssertionError(f"{call} had no visible effect; pass what it changes as effects=….")
    if grown != once:
        raise AssertionError(
            f"{call} crashed after its effects {once}. After the retry there are {grown or 'none'}. The response to "
            f"the retry: {described(response)}"
        )
    if response.status_code >= 400 and code(response) != "idempotency_key_on_hold":
        raise AssertionError(
            f"{call} crashed, and its retry got no final response within {patience:g} s: {described(response)}"
        )
    return response


@dataclass(frozen=True, slots=True)
class Death:
    """What the child saw last. ``database``: the alias of the record's database, if its lease can be ended there."""

    grown: dict[str, Any]
    id: str
    token: str
    database: str | None

    def end_lease(self) -> None:
        from django_idempotency.models import IdempotencyRecord

        if self.database is not None:
            rows = IdempotencyRecord.objects.using(self.database).filter(pk=self.id, token=self.token)
            rows.update(locked_until=F("locked_at"))


def _outside(grown: dict[str, Any]) -> dict[str, Any]:
    """Return ``grown`` without what was in the memory of the process, and as it comes out of the child's pipe."""
    received: dict[str, Any] = json.loads(json.dumps(grown, default=str))
    return {name: size for name, size in received.items() if name != "mail.outbox"}


def _served_by_a_child(call: Call, look: Callable[[], dict[str, Any]]) -> Death:
    _close_connections()  # the child must not use them
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork beside threads; the child uses none of them
        child = os.fork()
    if child == 0:
        os.close(reading)
        _serve_and_die(call, look, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    said = json.loads(output) if output else "the child process ended without output"
    if isinstance(said, dict):
        return Death(**said)
    raise AssertionError(f"{call}: no view was run under the key: {said}")


def _close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()


def _serve_and_die(call: Call, look: Callable[[], dict[str, Any]], pipe: int) -> NoReturn:
    """Serve the request in this process, and kill the process when the view's verdict is about to be carried out."""
    from django_idempotency.engine import Run

    def die(run: Run, *args: Any, **kwargs: Any) -> NoReturn:
        own = not run.policy.is_atomic and run.store.transactional
        name = run.store.name if own else None
        _say(pipe, asdict(Death(look(), str(run.claim.id), str(run.claim.token), name)))
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit  # not reached

    try:
        Run.end = die  # type: ignore[method-assign, assignment]
        _say(pipe, f"it got {described(call.send())}")
    except BaseException:  # nothing of the child may get back into the test
        _say(pipe, traceback.format_exc())
    finally:
        os._exit(0)


def _say(pipe: int, what: dict[str, Any] | str) -> None:
    rest = memoryview(json.dumps(what).encode())
    while rest:
        rest = rest[os.write(pipe, rest) :]
