"""An exception from a signal's handler, at each line of a run in turn, ours or
Django's.
"""

from __future__ import annotations

import sys
from linecache import getline
from pathlib import Path

import django.db
import pytest
from django.db import connection

import django_idempotency
from django_idempotency.values.policy import Atomic
from tests.support.callers import effects
from tests.support.waiting import eventually

OURS = str(Path(django_idempotency.__file__).parent)
DJANGOS = tuple(
    str(Path(django.db.__file__).parent / name)
    for name in ("transaction.py", "backends/base/base.py")
)


class Interrupted(Exception):
    """As Celery's ``SoftTimeLimitExceeded``."""


def striking(number, error, work):
    """Raise ``error`` at line ``number`` of ``work``. Return its result, or ``None`` if
    it was struck; and whether.
    """
    left = [number]

    def trace(frame, event, _argument):
        if not frame.f_code.co_filename.startswith((OURS, *DJANGOS)):
            return None
        # Python leaves a with block in its first line once more, where no signal's
        # handler runs.
        if event == "line" and not getline(
            frame.f_code.co_filename, frame.f_lineno
        ).lstrip().startswith("with "):
            left[0] -= 1
            if not left[0]:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work(), left[0] <= 0
    except error:
        return None, True
    except Exception:
        if left[0] > 0:
            raise
        return None, True
    finally:
        sys.settrace(before)


ATOMIC = {"mode": Atomic(takeover_grace=0)}
LOCK = {"mode": Atomic(claim="lock")}


def struck_by(of_records, of_locks):
    """Run a test for both kinds of claim, each struck by one kind of error.

    Requests and messages have the same run, so each error strikes each kind of claim in
    one of them.
    """
    marks = [pytest.mark.postgresql, pytest.mark.not_on_citus]
    by_lock = pytest.param(LOCK, of_locks, id="lock", marks=marks)
    return pytest.mark.parametrize(
        ("policy", "error"), [pytest.param(ATOMIC, of_records, id="record"), by_lock]
    )


def assert_all_or_nothing(do, *, is_done, is_running, error):
    """Strike ``do``, a run with one effect, at each of its lines. A retry of the same
    key must work and be done.

    The retry shows at once that the connection serves the next caller. Only the server
    may take a little longer to notice a connection that was closed in a transaction,
    and free its locks.
    """
    assert is_done(do("first"))
    number, struck = 0, True
    while struck:
        number += 1
        reference = f"line-{number}"
        result, struck = striking(number, error, lambda: do(reference))  # noqa: B023
        if is_done(result):
            assert effects(reference) == 1, (
                f"a success that was not committed, struck at line {number}"
            )
        retry = do(reference)
        assert is_done(retry) or is_running(retry), (
            f"{retry!r} after a strike at line {number}"
        )
        assert not connection.in_atomic_block
        assert is_done(retry) or eventually(lambda: is_done(do(reference))), (  # noqa: B023
            f"struck at line {number}"
        )
        assert effects(reference) == 1, (
            f"{effects(reference)} effects after a strike at line {number}"
        )
    assert number > 100
