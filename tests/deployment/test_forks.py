"""Lease mode in processes that fork once the package has been used, as servers do that
load the project first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from django.db.models.functions import Now

from django_idempotency.models import IdempotencyRecord
from tests.support.callers import record
from tests.support.databases import environment
from tests.support.forking import FORKS
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.row_locks,
    pytest.mark.usefixtures("payer"),
]


@contextmanager
def forked(how: str) -> Iterator[dict[str, int]]:
    """The processes that have the leases ``parent`` and ``child``, by the names of
    their keys.
    """
    command = [sys.executable, "-m", "tests.support.forking", how]
    processes: dict[str, int] = {}
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        try:
            for _line in range(2):
                name, pid = parent.stdout.readline().split()
                processes[name] = int(pid)
            yield processes
        finally:
            for pid in processes.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            parent.kill()


def lapsed(key: str) -> bool:
    return IdempotencyRecord.objects.filter(key=key, locked_until__lt=Now()).exists()


def wait_for_a_renewal(key: str) -> None:
    before = record(key).locked_until
    eventually(lambda: record(key).locked_until > before)


@pytest.mark.parametrize("how", FORKS)
def test_a_child_renews_its_leases_and_leaves_those_of_its_parent(how):
    with forked(how) as processes:
        wait_for_a_renewal("child")
        os.kill(processes["parent"], signal.SIGKILL)
        eventually(lambda: lapsed("parent"))
        wait_for_a_renewal("child")
