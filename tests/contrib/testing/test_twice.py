"""``sending_twice``, outside of the plugin: on PostgreSQL, with threads, cookies and
transactions.
"""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.test import AsyncClient, Client

from django_idempotency.contrib.testing import sending_twice
from tests.support.callers import effects
from tests.support.threads import in_threads

KEY = {"Idempotency-Key": "k"}


def differences(sent):
    return [line for one in sent for line in one.differences]


@pytest.mark.parametrize(
    ("always", "this_time"),
    [({}, KEY), (KEY, {})],
    ids=["the request's", "the client's"],
)
def test_the_effects_of_the_second_request_are_undone(customer, always, this_time):
    with sending_twice() as sent:
        Client(headers=always).post("/unprotected/", headers=this_time)
    assert differences(sent)[-1] == "testproject.LedgerEntry: 1 more row"
    assert effects() == 1


def test_a_transaction_that_the_second_broke_is_sound(client, customer):
    with sending_twice() as sent:
        client.post("/unique/", headers=KEY)
    assert "raised IntegrityError" in differences(sent)[0]
    assert effects() == 1


def test_a_request_sent_twice_is_reported_with_its_route(client, customer):
    with sending_twice() as sent:
        client.post("/orders/7/", headers=KEY)
    assert [(one.method, one.route, one.path, one.differences) for one in sent] == [
        ("POST", "/orders/<int:number>/", "/orders/7/", ())
    ]


@pytest.mark.parametrize("path", ["/orders/", "/unprotected/"])
def test_an_async_client_sends_its_requests_twice(path, customer):
    async def post():
        client = AsyncClient()
        return await client.post(path, {"item": "book"}, headers=KEY)

    with sending_twice() as sent:
        assert async_to_sync(post)().status_code == 201
    assert [(one.method, one.route) for one in sent] == [("POST", path)]
    assert bool(differences(sent)) is (path == "/unprotected/")
    assert effects() == 1


def test_outside_of_a_transaction_nothing_is_undone(client, payer):
    with sending_twice() as sent:
        client.post("/unprotected/", headers=KEY)
    assert differences(sent)
    assert effects() == 2


def test_the_second_request_has_the_cookies_of_the_first(client, customer):
    session = client.session
    session["seen"] = "alice"
    session.save()
    with sending_twice() as sent:
        client.post("/renewals/", headers=KEY)
    assert "testproject.LedgerEntry: 1 more row" in differences(sent), (
        "who lost the answer is nobody"
    )
    assert client.session["seen"] == "alice", (
        "the test goes on with the cookies of the first response"
    )


@pytest.mark.row_locks
def test_requests_of_other_threads_are_sent_once(payer):
    with sending_twice() as sent:
        in_threads(2, lambda _index: Client().post("/unprotected/", headers=KEY))
    assert (sent, effects()) == ([], 2)


def test_afterwards_requests_are_sent_once(client, customer):
    with sending_twice() as sent:
        pass
    client.post("/unprotected/", headers=KEY)
    assert (sent, effects()) == ([], 1)
