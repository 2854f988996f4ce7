"""A process of its own that runs one operation, or a command, as the test tells it: it can be stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.databases import environment

ROOT = Path(__file__).parents[2]
IN_VIEW, AFTER_EFFECT, COMMIT = "in the view", "after the effect", "COMMIT"


class Owner:
    """Says where it is, and continues when it is told to. Its view pays and answers 201 with the payment's id."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Stopped, it neither runs nor renews, but has its connections."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def holding(
    what: str = "request", *, renews: bool = False, **policy: Any
) -> Iterator[Owner]:
    """An owner that is in the view already, with the key ``k`` under ``policy``.

    ``what``: a request or a message. ``renews``: it renews its claim before it pays.
    """
    with _running("operation", what=what, renews=renews, policy=policy) as owner:
        assert owner.says() == IN_VIEW
        yield owner


@contextmanager
def stopping(point: str, **policy: Any) -> Iterator[Owner]:
    """An owner that stands at ``point``: ``IN_VIEW``, ``AFTER_EFFECT``, or before or after a step.

    As ``before COMMIT``; the other steps are statements, by their beginnings.
    """
    with _running(
        "operation", what="request", renews=False, policy=policy, point=point
    ) as owner:
        while owner.says() != point:
            owner.go_on()
        yield owner


@contextmanager
def commanding(*command: str, before: str) -> Iterator[Owner]:
    """A management command that stands just before its first statement that matches ``before``."""
    with _running("command", command=command, before=before) as owner:
        assert owner.says() == before
        yield owner


@contextmanager
def _running(work: str, **options: Any) -> Iterator[Owner]:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.owner_process",
            work,
            json.dumps(options, default=_as_json),
        ],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


def _as_json(mode: Any) -> Any:
    return {"word": mode.word, **asdict(mode)}


def _pause(where: Any) -> None:
    print(json.dumps(where), flush=True)
    sys.stdin.readline()


@contextmanager
def _at(point: str) -> Iterator[None]:
    from django.db import connection

    from tests.support.threads import just_after, just_before

    when, _space, step = point.partition(" ")
    if step == COMMIT:
        commit = connection._commit

        def committing() -> None:
            for act in (
                (lambda: _pause(point), commit)
                if when == "before"
                else (commit, lambda: _pause(point))
            ):
                act()

        connection._commit = committing
        yield
    elif when in ("before", "after"):
        with (just_before if when == "before" else just_after)(
            rf"\s*{step}", lambda: _pause(point)
        ):
            yield
    else:
        yield


def _operate(what: str, renews: bool, policy: dict[str, Any], point: str = "") -> Any:
    with _at("" if point == AFTER_EFFECT else point):
        return _run_operation(what, renews, policy)


def _run_operation(what: str, renews: bool, policy: dict[str, Any]) -> Any:
    from django.http import HttpResponse

    from django_idempotency.messages import Message, consume
    from django_idempotency.values.policy import Policy
    from tests.support.callers import BODY, SCOPE, entry_point, mode_of, pay

    if isinstance(policy.get("mode"), dict):
        policy["mode"] = mode_of(**policy["mode"])

    def work(context: Any) -> str:
        _pause(IN_VIEW)
        if renews:
            context.renew()
        paid = pay().id.hex
        _pause(AFTER_EFFECT)
        return paid

    def view(request: Any) -> HttpResponse:
        return HttpResponse(work(request.idempotency), status=201)

    if what == "request":
        answer = entry_point(view, **policy)()
        return [answer.status_code, answer.content.decode()]
    handled = consume(
        Message(SCOPE, "k", BODY),
        lambda _message, context: work(context),
        policy=Policy(**policy),
    )
    return [type(handled).__name__, getattr(handled, "result", None)]


def _command(command: list[str], before: str) -> Any:
    from django.core.management import call_command

    from tests.support.threads import just_before

    with just_before(before, lambda: _pause(before)):
        call_command(*command, verbosity=0)
    return command


def main(work: str, options: str) -> None:
    import django

    django.setup()
    try:
        outcome = {"operation": _operate, "command": _command}[work](
            **json.loads(options)
        )
    except Exception as error:
        outcome = [500, type(error).__name__]
    _pause(outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
