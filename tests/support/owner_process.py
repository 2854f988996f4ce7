"""A process of its own that runs one operation, or a command, and pauses where the test
says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.pausing_process import PausingProcess, pause, pausing

IN_VIEW, AFTER_EFFECT, COMMIT = "in the view", "after the effect", "COMMIT"


@contextmanager
def holding(
    what: str = "request", *, renews: bool = False, **policy: Any
) -> Iterator[PausingProcess]:
    """An owner that is in the view already, with the key ``k`` under ``policy``.

    Its view pays and answers 201 with the payment's id. ``what``: a request or a
    message. ``renews``: it renews its claim before it pays.
    """
    with pausing(_operate, what, renews, policy) as owner:
        assert owner.says() == IN_VIEW
        yield owner


@contextmanager
def stopping(point: str, **policy: Any) -> Iterator[PausingProcess]:
    """An owner that stands at ``point``: ``IN_VIEW``, ``AFTER_EFFECT``, or before or
    after a step.

    As ``before COMMIT``; the other steps are statements, by their beginnings.
    """
    with pausing(_operate, "request", False, policy, point) as owner:
        while owner.says() != point:
            owner.go_on()
        yield owner


@contextmanager
def commanding(*command: str, before: str) -> Iterator[PausingProcess]:
    """A management command that stands just before its first statement that matches
    ``before``.
    """
    with pausing(_command, command, before) as process:
        assert process.says() == before
        yield process


@contextmanager
def _at(point: str) -> Iterator[None]:
    from django.db import connection

    from tests.support.threads import just_after, just_before

    when, _space, step = point.partition(" ")
    if step == COMMIT:
        commit = connection._commit

        def committing() -> None:
            for act in (
                (lambda: pause(point), commit)
                if when == "before"
                else (commit, lambda: pause(point))
            ):
                act()

        connection._commit = committing
        yield
    elif when in ("before", "after"):
        with (just_before if when == "before" else just_after)(
            rf"\s*{step}", lambda: pause(point)
        ):
            yield
    else:
        yield


def _operate(what: str, renews: bool, policy: dict[str, Any], point: str = "") -> Any:
    try:
        with _at("" if point == AFTER_EFFECT else point):
            return _run_operation(what, renews, policy)
    except Exception as error:
        return [500, type(error).__name__]


def _run_operation(what: str, renews: bool, policy: dict[str, Any]) -> Any:
    from django.http import HttpResponse

    from django_idempotency.messages import Message, consume
    from django_idempotency.values.policy import Policy
    from tests.support.callers import BODY, SCOPE, entry_point, pay

    def work(context: Any) -> str:
        pause(IN_VIEW)
        if renews:
            context.renew()
        paid = pay().id.hex
        pause(AFTER_EFFECT)
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


def _command(command: tuple[str, ...], before: str) -> None:
    from django.core.management import call_command

    from tests.support.threads import just_before

    with just_before(before, lambda: pause(before)):
        call_command(*command, verbosity=0)
