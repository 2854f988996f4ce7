"""Runners in threads, and what they leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django_idempotency.consumers.runner import Runner
from tests.support.waiting import eventually


@contextmanager
def running(*runners: Runner[Any]) -> Iterator[None]:
    """The runners, each in a thread of its own; stopped afterwards, and what one of them raised is raised."""
    errors: list[BaseException] = []

    def run(runner: Runner[Any]) -> None:
        try:
            runner.run(patience=20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[runner]) for runner in runners]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for runner in runners:
            runner.stop()
        for thread in threads:
            thread.join(30)
    if errors:
        raise errors[0]


def redeliveries(runner: Runner[Any]) -> list[bool]:
    """Of two deliveries of the one message there is, what each says of having been delivered before."""
    told = []
    runner.open()
    try:
        for _delivery in range(2):
            (received,) = eventually(lambda: list(runner.receive(1, 10)))
            told.append(runner.message(received).redelivered)
            runner.later(received, 0.1)
    finally:
        runner.close()
    return told


class Gate:
    """A handler that waits inside until it is let through, and counts its runs."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.then = then
        self.entered, self.opened = threading.Event(), threading.Event()
        self.runs = 0

    def __call__(self, message: Any, context: Any) -> Any:
        self.runs += 1
        self.entered.set()
        assert self.opened.wait(30)
        return self.then(message, context)
