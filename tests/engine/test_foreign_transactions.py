"""A claim is not made, and not run, inside somebody else's transaction."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import TestCase

from django_idempotency import engine
from django_idempotency.exceptions import ClaimInsideTransaction
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from tests.support.callers import MODES, claim, effects, entry_point, operation, paying
from tests.support.views_of_laws import OTHER_BODY, postgresql

pytestmark = pytest.mark.usefixtures("payer")


def test_a_claim_inside_a_foreign_transaction_says_what_to_do():
    with transaction.atomic(), pytest.raises(ClaimInsideTransaction, match="outside the transaction"):
        entry_point(paying)()
    assert effects() == 0


def test_an_operation_is_not_run_inside_a_foreign_transaction():
    claimed = claim(policy=Policy())
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"), engine.execution(claimed, Policy()):
        pass
    assert effects() == 0


class TestInsideDjangosTestCase(TestCase):
    """A project's own ``TestCase`` holds a transaction open; the entry points work in it all the same."""

    def test_a_request_is_run_once_and_replayed(self):
        for mode in MODES:
            send = entry_point(lambda request: HttpResponse(str(uuid4()), status=201), mode=mode)
            assert send(key=mode).content == send(key=mode).content
            assert send(key=mode, body=OTHER_BODY).status_code == 422

    @postgresql
    def test_a_read_only_store_is_unavailable_in_a_foreign_transaction(self):
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        answer = entry_point(paying)()
        assert (answer.status_code, b"idempotency_store_unavailable" in answer.content) == (503, True)
        assert store_for(Policy()).reconnect() is False

    def test_a_record_made_meanwhile_does_not_fail_the_transaction(self):
        store, wanted = DatabaseStore(Policy(), "default"), operation()
        store.claim(wanted, uuid4())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DatabaseStore, "read", lambda *_: None)  # it was not there yet
            assert store.claim(wanted, uuid4()) is None
        assert store.read(wanted.id).key == wanted.key
