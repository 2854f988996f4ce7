"""Runners in threads, and what they leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error, connections

from django_idempotency.messages.runner import Runner


@contextmanager
def running(*runners: Runner[Any]) -> Iterator[None]:
    """The runners, each in a thread of its own; stopped afterwards, and what one of
    them raised is raised.
    """
    errors: list[BaseException] = []

    def run(runner: Runner[Any]) -> None:
        try:
            runner.run()
        except BaseException as error:
            errors.append(error)
        finally:
            for connection in connections.all(initialized_only=True):
                with suppress(Error):  # a handler may have closed it under Django
                    connection.close()

    threads = [threading.Thread(target=run, args=[runner]) for runner in runners]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for runner in runners:
            runner.stop()
        for thread in threads:
            thread.join(120)
    if errors:
        raise errors[0]


class Gate:
    """A handler that waits inside until it is let through, and counts its runs."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.then = then
        self.entered, self.opened = threading.Event(), threading.Event()
        self.runs = 0

    def __call__(self, message: Any, context: Any) -> Any:
        self.runs += 1
        self.entered.set()
        assert self.opened.wait(60)
        return self.then(message, context)


def beats_of(runner: Runner[Any]) -> list[float]:
    """When the runner tells its broker that it is alive: filled in as it does."""
    beats: list[float] = []
    keep_alive = runner.keep_alive

    def noted() -> None:
        keep_alive()
        beats.append(time.monotonic())

    runner.keep_alive = noted  # type: ignore[method-assign]
    return beats
