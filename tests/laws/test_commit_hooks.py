"""L8: what is to run on commit runs once where the process knows of the COMMIT, and one hook's error stops no other."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import TestCase

from tests.support.callers import effects, entry_point, is_replay, pay, paying
from tests.support.proxy import Cut

pytestmark = pytest.mark.usefixtures("payer")


def fail():
    raise ArithmeticError("asked for")


def test_a_hook_that_raises_does_not_stop_the_next(caplog):
    ran = []

    def view(request):
        for hook in (partial(ran.append, 1), fail, partial(ran.append, 2)):
            transaction.on_commit(hook)
        transaction.on_commit(fail, robust=True)
        transaction.on_commit(partial(ran.append, 3))
        return paying(request)

    answer = entry_point(view)()
    assert (answer.status_code, ran, effects()) == (201, [1, 2, 3], 1)
    assert [told.event for told in caplog.records] == ["committed_with_error"] * 2
    assert is_replay(entry_point(view)())
    assert ran == [1, 2, 3]


@pytest.mark.postgresql
@pytest.mark.parametrize("status", [201, 409, 422])
def test_hooks_run_once_after_a_lost_commit_response(proxy, status):
    ran = []

    def view(request):
        transaction.on_commit(fail)
        transaction.on_commit(lambda: ran.append(connection.in_atomic_block))
        proxy.cut = Cut.AFTER_COMMIT
        pay()
        return HttpResponse(status=status)

    assert entry_point(view)().status_code == status
    assert (ran, effects(), proxy.cuts) == ([False], 1, 1)


@pytest.mark.parametrize(("status", "runs"), [(500, []), (503, []), (422, [1])])
def test_hooks_run_where_the_view_is_not_rolled_back(status, runs):
    ran = []

    def view(request):
        transaction.on_commit(lambda: ran.append(1))
        return HttpResponse(status=status)

    entry_point(view)()
    assert ran == runs


class InATestCase(TestCase):
    def test_hooks_can_be_captured_as_ever(self):
        def view(request):
            transaction.on_commit(fail)
            return HttpResponse()

        with self.captureOnCommitCallbacks() as callbacks:
            entry_point(view)()
        assert callbacks == [fail]
