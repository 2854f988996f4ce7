"""The laws, over HTTP: the real server with its processes and threads, whose workers
are killed where a law says so.
"""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

from tests.support.callers import is_replay, payment
from tests.support.threads import in_threads
from tests.support.views_of_laws import completed
from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.row_locks]
postgresql = pytest.mark.postgresql

ATOMIC = {
    "the mixin": "/api/charges/",
    "the mixin, key required": "/api/transfers/",
    "the decorator": "/orders/",
    "the middleware": "/legacy/refunds/",
    "the middleware, REST framework": "/legacy/api/refunds/",
}
LEASED = {
    "the mixin, a gateway": "/api/payouts/",
    "the decorator, async": "/async/orders/",
}
of_each_atomic_door = pytest.mark.parametrize("path", ATOMIC.values(), ids=ATOMIC)
of_each_door = pytest.mark.parametrize(
    "path", (ATOMIC | LEASED).values(), ids=ATOMIC | LEASED
)
in_both_modes = pytest.mark.parametrize(
    "serving", ["server", "lease_server"], indirect=True, ids=["atomic", "lease"]
)


@pytest.fixture
def serving(request):
    return request.getfixturevalue(request.param)


def send(server, path, reference, **options):
    return server.post(path, payment(reference), **{"key": reference} | options)


@in_both_modes
@of_each_door
def test_l1_of_50_duplicates_at_once_one_takes_effect(serving, path, reference):
    slow = {"delay_ms": 50}
    answers = in_threads(50, lambda _: send(serving, path, reference, simulate=slow))
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses[201] + statuses[409] == 50
    assert (
        sum(answer.status_code == 201 and not is_replay(answer) for answer in answers)
        == 1
    )
    assert serving.ledger(reference) == 1
    done = {answer.content for answer in answers if answer.status_code == 201}
    assert done == {send(serving, path, reference).content}


@of_each_door
def test_l2_a_replay_is_the_first_response(server, path, reference):
    first, second = (send(server, path, reference) for _ in range(2))
    assert (first.status_code, is_replay(first)) == (201, False)
    assert (second.status_code, second.content) == (201, first.content)
    unlike = {"date", "idempotent-replayed", "cache-control"}
    assert headers(second, unlike) == headers(first, unlike)
    assert is_replay(second)


def headers(answer, unlike):
    return {name: value for name, value in answer.headers.items() if name not in unlike}


@postgresql
@of_each_atomic_door
def test_l3_what_fails_at_commit_is_a_failure(server, path, reference):
    failed = send(server, path, reference, simulate={"fail_commit": True})
    assert (failed.status_code, server.ledger(reference)) == (500, 0)
    retried = send(server, path, reference)
    assert (retried.status_code, is_replay(retried), server.ledger(reference)) == (
        201,
        False,
        1,
    )


@of_each_atomic_door
@pytest.mark.parametrize("when", ["before", "after"])
def test_l4_and_l6_after_a_killed_worker_the_retry_runs_at_once(
    server, path, when, reference
):
    with pytest.raises(httpx.TransportError):
        send(server, path, reference, simulate={"kill": when})
    # a lease is 20 s here
    retried = eventually(lambda: completed(send(server, path, reference)))
    assert not is_replay(retried)
    assert server.ledger(reference) == 1


@pytest.mark.parametrize("path", LEASED.values(), ids=LEASED)
def test_l6_in_lease_mode_a_killed_workers_lease_must_lapse(
    lease_server, path, reference
):
    with pytest.raises(httpx.TransportError):
        send(lease_server, path, reference, simulate={"kill": "after"})
    refused = send(lease_server, path, reference)
    assert (refused.status_code, refused.headers["Retry-After"] in ("1", "2", "3")) == (
        409,
        True,
    )
    assert eventually(lambda: completed(send(lease_server, path, reference)))
    assert lease_server.ledger(reference) == 1  # by its child key


@of_each_door
def test_l7_a_stored_response_is_for_its_caller_alone(server, path, reference):
    own = send(server, path, reference)
    for token in (None, "mallory-token"):
        refused = send(server, path, reference, token=token)
        assert (refused.status_code, is_replay(refused)) == (401, False)
    bobs = send(server, path, reference, token="bob-token")
    assert (bobs.status_code, is_replay(bobs)) == (201, False)
    assert bobs.content != own.content
    assert server.ledger(reference) == 2
    assert send(server, path, reference).content == own.content


SHAPES = (
    {"stream": True},
    {"bytes": 2_000_000},
    {"stream": True, "bytes": 2_000_000},
    {"status": 204},
)


@in_both_modes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_l8_whatever_the_response_was_nothing_runs_again(serving, shape, reference):
    first = send(serving, "/api/charges/", reference, simulate=shape)
    second = send(serving, "/api/charges/", reference)
    assert second.status_code == first.status_code == shape.get("status", 201)
    assert is_replay(second)
    assert serving.ledger(reference) == 1


@of_each_door
def test_l10_another_body_is_refused_and_the_response_stays(server, path, reference):
    first = send(server, path, reference)
    other = server.post(path, payment(reference) | {"amount": 6}, key=reference)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert send(server, path, reference).content == first.content
    assert server.ledger(reference) == 1
