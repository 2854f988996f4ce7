"""The admin tells of keys in flight whose claims are locks, which no list of records can show."""

from __future__ import annotations

import pytest
from django.utils.html import escape

from django_idempotency.maintenance.owners import lock_owners
from django_idempotency.policy import Atomic
from tests.admin.pages import LIST
from tests.support.callers import Gate

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

OF_KEY = "The key is in flight without a record: its claim is a lock."
OF_ALL = "1 run is in flight without a record: its claim is a lock."


@pytest.fixture
def listed(client, staff):
    def shown(**query):
        response = client.get(LIST, query)
        assert response.status_code == 200
        return response.content.decode()

    return shown


def test_a_search_for_the_key_shows_its_owner(listed):
    with Gate().running_with("made", mode=Atomic(claim="lock")):
        (owner,) = lock_owners("default")
        for term in ("made", '"made"'):
            page = listed(q=term)
            assert OF_KEY in page
            assert escape(f"PID {owner.pid} of the database") in page
            assert "its transaction began" in page
        assert OF_KEY not in listed(q="mad")
    assert OF_KEY not in listed(q="made")


def test_the_list_of_what_is_in_flight_tells_how_many(listed):
    with Gate().running(mode=Atomic(claim="lock")):
        assert OF_ALL in listed()
        assert OF_ALL not in listed(situation="on_hold")
    assert OF_ALL not in listed()


def test_a_database_that_does_not_respond_leaves_the_page(listed, monkeypatch):
    monkeypatch.setattr("django_idempotency.maintenance.owners.OWNERS", "SELECT pg_sleep(60), %s, %s")
    assert "Dashboard" in listed(q="made")


def test_the_dashboard_counts_runs_claimed_by_lock(client, staff):
    with Gate().running(mode=Atomic(claim="lock")):
        page = client.get(f"{LIST}dashboard/").content.decode()
    assert "Pending by lock" in page
    assert "Oldest by lock" in page
