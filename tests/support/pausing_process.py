"""A process of its own, on the test database, that pauses where it says it is until the
test lets it go on. It can be stopped and killed.

It is forked from a process that has loaded the project and has no connections, so that
it starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import django

from tests.support.databases import environment
from tests.support.waiting import eventually

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.support.loaded"])
_to_test: Connection  # in the process


class PausingProcess:
    def __init__(self, process: ForkServerProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def says(self) -> Any:
        return self._pipe.recv()

    def go_on(self) -> None:
        self._pipe.send(None)

    def stop(self) -> None:
        """Stopped, it neither runs nor renews, but has its connections."""
        os.kill(self._pid, signal.SIGSTOP)
        eventually(self._is_stopped)

    def _is_stopped(self) -> bool:
        threads = Path(f"/proc/{self._pid}/task").glob("*/stat")
        with suppress(FileNotFoundError, ProcessLookupError):  # one has ended just now
            return all(") T " in each.read_text() for each in threads)
        return False

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


@contextmanager
def pausing(
    main: Callable[..., object], *arguments: Any, **options: Any
) -> Iterator[PausingProcess]:
    """A process that calls ``main``, and says at the end what that returned; killed
    then.
    """
    pipe, to_test = FORK_SERVER.Pipe()
    with pipe:
        with to_test, patch.dict(os.environ, environment()):  # the fork server's, too
            process = FORK_SERVER.Process(
                target=_run, args=(to_test, main, arguments, options)
            )
            process.start()
        running = PausingProcess(process, pipe)
        try:
            yield running
        finally:
            running.kill()


def _run(
    to_test: Connection,
    main: Callable[..., object],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    global _to_test
    _to_test = to_test
    django.setup()  # does nothing again
    pause(main(*arguments, **options))


def pause(where: Any) -> None:
    _to_test.send(where)
    _to_test.recv()
