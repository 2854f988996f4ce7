"""A run ends once, or the next claim rolls it back, unless its view still runs; no run
is in another's transaction.
"""

from __future__ import annotations

import gc
from uuid import uuid4

import pytest
from django.core.handlers.base import BaseHandler
from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import TestCase

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine.leases import keeper_of
from django_idempotency.http.handlers import HANDLER
from django_idempotency.http.placement import idempotent
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.exceptions import ClaimInsideTransaction
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import (
    MODES,
    claim,
    effects,
    entry_point,
    operation,
    pay,
    paying,
    post,
    record,
    stop_heartbeat,
)
from tests.support.views_of_laws import OTHER_BODY, postgresql

pytestmark = pytest.mark.usefixtures("payer")

KINDS = ["record", pytest.param("lock", marks=pytest.mark.postgresql)]


def begin(**policy):
    run = engine.begin(operation("left"), resolve(Policy(scope="public", **policy)))
    assert isinstance(run, engine.Run)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_nobody_ended_is_rolled_back_by_the_next_claim(
    kind, caplog, other_thread
):
    begin(mode=Atomic(claim=kind))
    pay("half")
    assert entry_point(paying, mode=Atomic(claim=kind))().status_code == 201
    (said,) = caplog.records
    assert (said.event, said.record_id) == ("unended", str(operation("left").id))
    assert (other_thread(effects, "half"), other_thread(effects)) == (0, 1)
    assert (
        other_thread(
            entry_point(paying, mode=Atomic(takeover_grace=0)), "left"
        ).status_code
        == 201
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_inside_a_running_view_leaves_its_run_alone(kind, other_thread):
    def view(request):
        response = paying(request)
        with pytest.raises(ClaimInsideTransaction):
            entry_point(paying, mode=Atomic(claim=kind))("inner")
        return response

    assert entry_point(view, mode=Atomic(claim=kind))().status_code == 201
    assert (other_thread(effects), record().response_status) == (1, 201)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_while_the_response_renders_leaves_the_run_alone(kind, other_thread):
    inner = []

    def claim_inside(response):
        with pytest.raises(ClaimInsideTransaction):
            entry_point(paying, mode=Atomic(claim=kind))("inner")
        inner.append(response)

    def view(_request):
        pay()
        response = SimpleTemplateResponse(
            engines["django"].from_string("paid"), status=201
        )
        response.add_post_render_callback(claim_inside)
        return response

    assert entry_point(view, mode=Atomic(claim=kind))().status_code == 201
    assert (len(inner), other_thread(effects), record().response_status) == (1, 1, 201)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_in_a_middleware_that_handles_an_exception_leaves_the_run_alone(
    kind, other_thread
):
    def process_exception(_request, _error):
        with pytest.raises(ClaimInsideTransaction):
            entry_point(paying, mode=Atomic(claim=kind))("inner")
        return HttpResponse("refused", status=409)

    def view(request):
        paying(request)
        raise ValueError

    handler = BaseHandler()
    handler._exception_middleware = [process_exception]
    request = post()
    setattr(request, HANDLER, handler)
    assert (
        idempotent(scope="public", mode=Atomic(claim=kind))(view)(request).status_code
        == 409
    )
    assert (other_thread(effects), record().response_status) == (1, 409)


def test_a_claim_in_a_commit_hook_leaves_the_run_alone(other_thread):
    def hook(_request):
        return HttpResponse(str(pay("hook").pk), status=201)

    def view(request):
        transaction.on_commit(lambda: entry_point(hook)("inner"))
        return paying(request)

    assert entry_point(view)().status_code == 201
    assert (
        other_thread(effects),
        other_thread(effects, "hook"),
        record().response_status,
    ) == (1, 1, 201)


def test_the_lease_of_a_run_that_nobody_can_end_is_not_renewed(caplog):
    stop_heartbeat()
    run = begin(mode="lease")
    keeper = keeper_of(run.store)
    assert keeper.due() is not None
    del run
    gc.collect()
    keeper.work()
    assert keeper.due() is None
    assert [record.event for record in caplog.records] == ["unended"]


@pytest.mark.parametrize("policy", [{}, {"mode": "lease"}], ids=["atomic", "lease"])
def test_a_run_ends_once(policy):
    run = begin(**policy)
    assert run.end(Keep(StoredResponse(201))) is None
    with pytest.raises(RuntimeError, match="ended already"):
        run.end(Keep(StoredResponse(202)))
    assert record("left").response_status == 201


def test_a_block_that_a_view_never_left_commits_nothing(other_thread):
    def view(request):
        pay("half")
        transaction.atomic().__enter__()
        return HttpResponse(status=201)

    with pytest.raises(TransactionManagementError, match="never left"):
        entry_point(view)()
    assert not connection.in_atomic_block
    assert other_thread(effects, "half") == 0
    assert entry_point(paying)().status_code == 201


def test_an_operation_is_not_run_inside_a_foreign_transaction():
    claimed = claim(policy=Policy())
    with (
        transaction.atomic(),
        pytest.raises(RuntimeError, match="durable"),
        engine.execution(claimed, Policy()),
    ):
        pass
    assert effects() == 0


class TestInsideDjangosTestCase(TestCase):
    """A project's own ``TestCase`` holds a transaction open; the entry points work in
    it all the same.
    """

    def test_a_request_is_run_once_and_replayed(self):
        for mode in MODES:
            self.is_run_once_and_replayed(mode, key=mode)

    @postgresql
    def test_a_request_claimed_by_lock_is_run_once_and_replayed(self):
        """What is locked outlasts the run: for others, not for itself."""
        self.is_run_once_and_replayed(Atomic(claim="lock"), key="lock")

    def is_run_once_and_replayed(self, mode, key):
        def view(request):
            return HttpResponse(
                str(uuid4()), status=500 if request.idempotency.key == "fails" else 201
            )

        send = entry_point(view, mode=mode)
        assert [send("fails").status_code, send("fails").status_code] == [500, 500]
        first, again, other = send(key), send(key), send(key, body=OTHER_BODY)
        assert (first.status_code, again.content, other.status_code) == (
            201,
            first.content,
            422,
        )

    @postgresql
    def test_a_read_only_store_is_unavailable_in_a_foreign_transaction(self):
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        answer = entry_point(paying)()
        assert (
            answer.status_code,
            b"idempotency_store_unavailable" in answer.content,
        ) == (503, True)
        assert store_for(Policy()).reconnect() is False

    def test_a_record_made_meanwhile_does_not_fail_the_transaction(self):
        store, wanted = DatabaseStore(Policy(), "default"), operation()
        store.claim(wanted, uuid4())
        with pytest.MonkeyPatch.context() as patch:
            # it was not there yet
            patch.setattr(DatabaseStore, "read", lambda *_: None)
            assert store.claim(wanted, uuid4()) is None
        assert store.read(wanted.id).key == wanted.key
