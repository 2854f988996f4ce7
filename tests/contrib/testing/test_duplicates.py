"""``duplicates_at_once``: threads with connections of their own, and what a peer without a claim does."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction

from django_idempotency.contrib.testing import duplicates_at_once
from testproject.models import LedgerEntry
from tests.contrib.testing import shop

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.row_locks]


@pytest.mark.parametrize("path", ["/orders/", "/lease/"])
def test_duplicates_at_once_are_executed_once(client, path):
    before = LedgerEntry.objects.count()
    response = duplicates_at_once(client, "POST", path, {"item": "book"}, count=4)
    assert response.status_code == 201
    assert LedgerEntry.objects.count() == before + 2, "one, and the one that measured"


def test_each_thread_has_a_connection_of_its_own(client, monkeypatch):
    used = []
    monkeypatch.setattr(shop, "numbers", Told(lambda: used.append(connection.connection)))
    monkeypatch.setattr(shop, "together", threading.Barrier(3))
    with pytest.raises(AssertionError):
        duplicates_at_once(client, "POST", "/remembered/", count=3, once={"testproject.LedgerEntry": 1})
    assert len(set(used)) == 3


class Told:
    def __init__(self, tell):
        self.tell = tell

    def __next__(self):
        self.tell()
        return 1


def test_a_peer_that_looks_and_then_acts_fails(client, monkeypatch):
    monkeypatch.setattr(shop, "together", threading.Barrier(2))
    with pytest.raises(AssertionError, match=r"'testproject.LedgerEntry': 2\} were added"):
        duplicates_at_once(client, "POST", "/remembered/", count=2, once={"testproject.LedgerEntry": 1})


def test_responses_that_differ_fail_though_one_was_executed(client):
    with pytest.raises(AssertionError, match="duplicate"):
        duplicates_at_once(client, "POST", "/pointed/", count=3, once=1, effects=LedgerEntry.objects.all())


def test_effects_are_compared_by_number(client, monkeypatch):
    options = {"count": 2, "once": 1, "effects": LedgerEntry.objects.all()}
    duplicates_at_once(client, "POST", "/orders/", **options)
    with pytest.raises(AssertionError, match=r"one execution adds {'effects': 1}, but {'effects': 2} were added"):
        duplicates_at_once(client, "POST", "/unprotected/", **options)


def test_the_effect_of_one_execution_is_measured_first(client):
    with pytest.raises(AssertionError, match=r"adds {'testproject.LedgerEntry': 1}, but {'.*': 3} were added"):
        duplicates_at_once(client, "POST", "/unprotected/", count=3)


def test_an_effect_that_can_not_be_measured_must_be_stated(client):
    with pytest.raises(AssertionError, match="pass once="):
        duplicates_at_once(client, "POST", "/nothing/", count=2)


def test_a_duplicate_that_never_gets_the_response_fails(client):
    with pytest.raises(AssertionError, match=r"got no final response within 0.1 s: 409"):
        duplicates_at_once(client, "POST", "/busy/", count=2, patience=0.1, once={})


def test_effects_without_a_size_are_refused(client):
    with pytest.raises(TypeError, match="number or a collection"):
        duplicates_at_once(client, "POST", "/orders/", count=2, effects=object)


def test_duplicates_at_once_is_refused_in_a_transaction(client):
    with transaction.atomic(), pytest.raises(RuntimeError, match="real commits"):
        duplicates_at_once(client, "POST", "/orders/")
