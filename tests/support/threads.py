"""Real threads that start together."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections

from tests.support.sql import run_sql


def in_threads(count: int, work: Callable[[int], Any], *, timeout: float = 60) -> list:
    """What ``work(0)`` … ``work(count - 1)`` returned, each run in a thread of its own,
    all let go at once.

    Exceptions are raised together, as an ``ExceptionGroup``. Each thread closes its
    database connections, so that the test database can be dropped.
    """
    barrier = threading.Barrier(count)

    def run(index: int) -> Any:
        try:
            barrier.wait(timeout)
            return work(index)
        except Exception as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        outcomes = [future.result(timeout) for future in futures]
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {count} threads failed", errors)
    return outcomes


class OtherThread:
    """A thread with database connections of its own, which does one thing after another
    as it is told.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return self._pool.submit(work, *args, **named).result(60)

    def close(self) -> None:
        self(connections.close_all)
        self._pool.shutdown()


IMPATIENCE = {
    "postgresql": "SET statement_timeout = '30s'",
    "mysql": "SET innodb_lock_wait_timeout = 5, lock_wait_timeout = 5",
    # it can only find a live owner's lock by waiting for it
    "sqlite": "PRAGMA busy_timeout = 50",
}


def wait_little_for_locks() -> None:
    """Have this thread's connection fail where it would wait for a lock that nobody is
    going to give back.
    """
    connection.cursor().execute(IMPATIENCE[connection.vendor])


@contextmanager
def just_before(statement: str, act: Callable[[], Any]) -> Iterator[None]:
    """Call ``act`` once, just before this thread sends its first statement that
    matches.
    """
    with _around(statement, lambda execute: (act(), execute())[1]):
        yield


@contextmanager
def just_after(statement: str, act: Callable[[], Any]) -> Iterator[None]:
    """Call ``act`` once, when this thread's first statement that matches has been
    executed, but is not committed.
    """
    with _around(statement, lambda execute: (execute(), act())[0]):
        yield


@contextmanager
def _around(statement: str, act: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, *details: Any) -> Any:
        if seen or not re.match(statement, sql, re.DOTALL):
            return execute(sql, *details)
        seen.append(sql)
        return act(lambda: execute(sql, *details))

    with connection.execute_wrapper(wrapper):
        yield
    assert seen, f"no statement {statement!r} was sent"


LOCKS = {
    "postgresql": ("BEGIN; LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", "ROLLBACK"),
    "mysql": ("LOCK TABLES {} WRITE", "UNLOCK TABLES"),
}


@contextmanager
def locked(table: str) -> Iterator[None]:
    """Lock it from a thread with a connection of its own."""
    lock, unlock = LOCKS[connection.vendor]
    elsewhere = OtherThread()
    elsewhere(run_sql, lock.format(table))
    try:
        yield
    finally:
        elsewhere(run_sql, unlock)
        elsewhere.close()
