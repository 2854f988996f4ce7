"""The checker of histories passes correct ones, names each wrong one, and catches
broken entry points.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
from django.db import connections, transaction
from django.http import HttpResponse

from tests.faults import trials
from tests.faults.trials import (
    LOST,
    Call,
    History,
    Kind,
    Response,
    check,
    exercise,
    plan,
    without_losses,
)
from tests.support.callers import effects, entry_point, pay, post

A, B = Response(201, b"a"), Response(201, b"b")
IN_FLIGHT, MISMATCH, ERROR = Response(409), Response(422), Response(500)
NO_RESPONSE = None
UNENDED = object()


def told(*requests, key="k"):
    """A history of requests, one after the other: a response, or a variant and its
    response.
    """
    history = History()
    for number, request in enumerate(requests):
        variant, response = request if isinstance(request, tuple) else (0, request)
        call = Call(key, variant=variant, number=number)
        exchange = history.begin(call)
        if response is not UNENDED:
            history.end(exchange, response)
    return history.exchanges


RIGHT = {
    "once": ([A], 1),
    "replayed": ([A, A, A], 1),
    "a duplicate refused, then replayed": ([IN_FLIGHT, A], 1),
    "no response, and it was done": ([NO_RESPONSE, A], 1),
    "no response, and it was not done": ([NO_RESPONSE, ERROR, IN_FLIGHT, A], 1),
    "a response that never came": ([UNENDED, A], 1),
    "another body refused": ([A, (1, MISMATCH), A], 1),
    "the other body was first": ([(1, A), (0, MISMATCH)], 1),
    "the other body was first, and released": (
        [(1, Response(404)), (0, MISMATCH), (1, Response(404)), (0, A)],
        1,
    ),
    "one effect, and it is the one that was told": (
        [Response(201, b"a", effect="e")],
        ["e"],
    ),
}


@pytest.mark.parametrize(("requests", "count"), RIGHT.values(), ids=RIGHT)
def test_a_right_history_holds(requests, count):
    verdict = check(told(*requests), {"k": count})
    assert verdict.holds, verdict


WRONG = {
    "two effects": ([A, A], 2, "took effect 2 times"),
    "an effect of refused requests": (
        [IN_FLIGHT, MISMATCH],
        1,
        "took effect, although every request was refused",
    ),
    "an effect of a key that nobody sent": (
        [],
        1,
        "took effect, although every request was refused",
    ),
    "phantom success": ([A], 0, "succeeded, but did not take effect"),
    "other bytes": ([A, B], 1, "got different responses"),
    "another body": ([A, (1, A)], 1, "got a response for different requests"),
    "another effect": (
        [Response(201, b"a", effect="lost")],
        ["there"],
        "got a response with an effect that is not there (there is there)",
    ),
    "a response that names no effect, where effects have names": (
        [Response(201, b"a")],
        ["there"],
        "got a response with an effect that is not there (there is there)",
    ),
    "a mismatch with itself": (
        [A, MISMATCH],
        1,
        "was refused as different from the request that got the response",
    ),
    "stuck": ([NO_RESPONSE, IN_FLIGHT], 1, "never got a response"),
}


@pytest.mark.parametrize(("requests", "count", "law"), WRONG.values(), ids=WRONG)
def test_a_wrong_history_is_named_by_the_law_it_breaks(requests, count, law):
    verdict = check(told(*requests), {"k": count})
    assert law in [violation.law for violation in verdict.violations]
    assert law in str(verdict)


def test_a_history_that_was_not_drained_may_lack_responses():
    assert check(told(NO_RESPONSE, IN_FLIGHT), {"k": 1}, drained=False).holds


def test_the_evidence_is_the_keys_own_and_brief():
    history = told(IN_FLIGHT, A, (1, MISMATCH), A, B, A)
    (violation,) = check(history, {"k": 1}).violations
    assert [exchange.begun for exchange in violation.evidence] == [2, 8]


def test_keys_are_judged_apart():
    history = [*told(A), *told(A, key="other")]
    (violation,) = check(history, {"k": 1, "other": 2}).violations
    assert violation.key == "other"


def test_the_seed_decides_what_is_sent():
    sizes = {"clients": 4, "keys": 10, "operations": 100}
    assert plan(1, **sizes) == plan(1, **sizes) != plan(2, **sizes)


def test_a_plan_has_every_operation_once_and_keys_that_clients_share():
    planned = plan(1, clients=4, keys=10, operations=100)
    calls = [call for client in planned for call, _repeats in client]
    assert sorted(call.number for call in calls) == [*range(100)]
    by_client = [{call.index for call, _repeats in client} for client in planned]
    assert set.union(*by_client) <= {*range(10)}
    assert len(set.intersection(*by_client)) > 5


def test_faults_end_before_the_keys_are_drained():
    seen = []

    def nemesis(decide, over):
        seen.append(decide.random())
        over.wait()
        seen.append("over")

    def send(call):
        seen.append("draining" if call.draining else "working")
        return Response(201)

    exercise(
        send, lambda key: 1, clients=2, keys=3, operations=20, seed=1, nemesis=nemesis
    )
    assert "working" in seen
    assert {*seen[seen.index("over") + 1 :]} == {"draining"}


def test_an_effect_after_the_last_response_is_counted(monkeypatch):
    """As a zombie's effect would: its worker goes on when everybody has been
    answered.
    """
    late = []

    def sleep(seconds):
        if seconds == 3600:
            late.append("effect")

    times = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(trials, "time", times)
    verdict = exercise(
        lambda call: A,
        lambda key: 1 + len(late),
        clients=1,
        keys=1,
        operations=1,
        seed=1,
        settle=3600,
    )
    assert [violation.law for violation in verdict.violations] == [
        "took effect 2 times"
    ]


def test_a_key_whose_response_came_at_last_is_asked_for_once_more():
    responses = iter([A, B])
    verdict = exercise(
        lambda call: next(responses) if call.draining else ERROR,
        lambda key: 1,
        keys=1,
        operations=1,
    )
    assert [violation.law for violation in verdict.violations] == [
        "got different responses"
    ]


def test_an_exception_at_the_end_is_shown_without_a_response():
    def send(call):
        raise ConnectionError("the wire was cut")

    verdict = exercise(
        send, lambda key: 0, clients=2, keys=1, operations=4, seed=7, drain=0
    )
    assert verdict.counts == {Kind.INFO: verdict.counts.total()}
    assert "never got a response" in str(verdict)
    assert "the wire was cut" in str(verdict)
    assert "seed 7" in str(verdict)


def tried(view):
    """The verdict on a view that pays the reference that is its key."""

    def send(call):
        try:
            response = view(post(call.key, b'{"amount": %d}' % (5 + call.variant)))
        except Exception:
            return ERROR
        finally:
            connections.close_all()
        return Response(response.status_code, response.content)

    return exercise(send, effects, clients=8, keys=20, operations=80, seed=1)


def key_of(request):
    return request.headers["Idempotency-Key"].strip('"')


def paying(request):
    return HttpResponse(pay(key_of(request)).id.hex, status=201)


def behind(protect):
    """A home-made entry point around ``paying``: ``protect(responses, request)``."""
    responses = {}
    return lambda request: protect(responses, request)


def looking_first(responses, request):
    """Without a lock: whoever looks before the first is done runs as well."""
    if key_of(request) not in responses:
        response = paying(request)
        responses.setdefault(key_of(request), response)
    return responses[key_of(request)]


def storing_before_commit(responses, request):
    """Every other transaction fails after its response was stored."""
    if key_of(request) not in responses:
        with transaction.atomic():
            responses.setdefault(key_of(request), paying(request))
            if len(responses) % 2:
                raise ArithmeticError
    return responses[key_of(request)]


def answering_anew(responses, request):
    """The effect is there once, but the response is made again for everybody."""
    if (
        key_of(request) not in responses
        and responses.setdefault(key_of(request), request) is request
    ):
        paying(request)
    return HttpResponse(uuid.uuid4().hex, status=201)


BROKEN = {
    "no entry point": (lambda responses, request: paying(request), "took effect"),
    "a look without a lock": (looking_first, "took effect"),
    "a response stored before COMMIT": (
        storing_before_commit,
        "succeeded, but did not take effect",
    ),
    "a response made anew": (answering_anew, "got different responses"),
    "a key for whatever body": (looking_first, "got a response for different requests"),
}


@pytest.mark.row_locks
@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize(("protect", "law"), BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_point_is_caught(protect, law):
    verdict = tried(behind(protect))
    assert any(violation.law.startswith(law) for violation in verdict.violations), (
        verdict
    )


@pytest.mark.row_locks
@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_an_entry_point_of_the_package_passes_the_checker(mode):
    protected = entry_point(paying, mode=mode)
    verdict = tried(lambda request: protected(key_of(request), request.body))
    assert verdict.holds, verdict
    assert verdict.counts[Kind.FAIL]  # duplicates did meet, and other bodies were sent


def test_only_keys_that_ran_twice_count_as_lost():
    """Where a store may lose records; whatever else is wrong is judged."""
    events = [
        *told(A, B, key="lost"),
        *told(A, B, key="mixed up"),
        *told(ERROR, key="unanswered"),
    ]
    effects = {"lost": 2, "mixed up": 1, "unanswered": 0}
    counts = Counter()
    judged = without_losses(check(events, effects, drained=True), counts)
    assert counts == {LOST: 1}
    assert {violation.key for violation in judged.violations} == {
        "mixed up",
        "unanswered",
    }
