"""The judge of histories: right histories pass, each wrong one is told for what it is, and broken doors are caught."""

from __future__ import annotations

import uuid
from threading import Event, Timer

import pytest
from django.db import connections, transaction
from django.http import HttpResponse

from django_idempotency.testing import Answer, Call, History, Kind, check, exercise, plan
from tests.callers import door, effects, pay, post

A, B = Answer(201, b"a"), Answer(201, b"b")
IN_FLIGHT, MISMATCH, ERROR = Answer(409), Answer(422), Answer(500)
NO_ANSWER = None
UNENDED = object()


def told(*requests, key="k"):
    """A history of requests, one after the other: an answer, or a variant and its answer."""
    history = History()
    for number, request in enumerate(requests):
        variant, answer = request if isinstance(request, tuple) else (0, request)
        call = Call(key, variant=variant, number=number)
        history.invoke(call)
        if answer is not UNENDED:
            history.end(call, answer)
    return history.events


RIGHT = {
    "once": ([A], 1),
    "replayed": ([A, A, A], 1),
    "a duplicate refused, then replayed": ([IN_FLIGHT, A], 1),
    "no answer, and it was done": ([NO_ANSWER, A], 1),
    "no answer, and it was not done": ([NO_ANSWER, ERROR, IN_FLIGHT, A], 1),
    "an answer that never came": ([UNENDED, A], 1),
    "another body refused": ([A, (1, MISMATCH), A], 1),
    "the other body was first": ([(1, A), (0, MISMATCH)], 1),
    "the other body was first, and released": ([(1, Answer(404)), (0, MISMATCH), (1, Answer(404)), (0, A)], 1),
    "one effect, and it is the one that was told": ([Answer(201, b"a", effect="e")], ["e"]),
}


@pytest.mark.parametrize(("requests", "count"), RIGHT.values(), ids=RIGHT)
def test_a_right_history_holds(requests, count):
    verdict = check(told(*requests), {"k": count})
    assert verdict.holds, verdict


WRONG = {
    "two effects": ([A, A], 2, "took effect 2 times"),
    "two effects, and nobody knows of one": ([NO_ANSWER, A], 2, "took effect 2 times"),
    "an effect of refused requests": ([IN_FLIGHT, MISMATCH], 1, "took effect, though every request was refused"),
    "an effect of a key that nobody sent": ([], 1, "took effect, though every request was refused"),
    "phantom success": ([A], 0, "was answered, but did not take effect"),
    "other bytes": ([A, B], 1, "was answered in different ways"),
    "another status": ([A, Answer(200, b"a")], 1, "was answered in different ways"),
    "another body": ([A, (1, A)], 1, "was answered for different requests"),
    "another effect": (
        [Answer(201, b"a", effect="lost")],
        ["there"],
        "was answered with an effect that is not there (there is there)",
    ),
    "an answer that names no effect, where effects have names": (
        [Answer(201, b"a")],
        ["there"],
        "was answered with an effect that is not there (there is there)",
    ),
    "a mismatch with itself": ([A, MISMATCH], 1, "was refused as another request than the one that was answered"),
    "stuck": ([NO_ANSWER, IN_FLIGHT], 1, "was never answered"),
    "lost": ([ERROR], 0, "was never answered"),
}


@pytest.mark.parametrize(("requests", "count", "law"), WRONG.values(), ids=WRONG)
def test_a_wrong_history_is_told_for_what_it_is(requests, count, law):
    verdict = check(told(*requests), {"k": count})
    assert law in [violation.law for violation in verdict.violations]
    assert law in str(verdict)


def test_what_is_not_drained_may_be_unanswered():
    assert check(told(NO_ANSWER, IN_FLIGHT), {"k": 1}, drained=False).holds


def test_the_evidence_is_the_key_s_alone_and_no_more_than_it_takes():
    history = told(IN_FLIGHT, A, (1, MISMATCH), A, B, A)
    (violation,) = check(history, {"k": 1}).violations
    assert [event.order for event in violation.evidence] == [2, 3, 8, 9]


def test_keys_are_judged_apart():
    history = [*told(A), *told(A, key="other")]
    (violation,) = check(history, {"k": 1, "other": 2}).violations
    assert violation.key == "other"


def test_a_history_whose_ends_belong_to_no_request_is_refused():
    history = told(A)
    with pytest.raises(ValueError, match="An end without its request"):
        check(history[1:], {"k": 1})
    with pytest.raises(ValueError, match="number them"):
        check([history[0], *history], {"k": 1})


# --- Trials -----------------------------------------------------------------------------------------------------------


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


def test_the_nemesis_harms_until_the_work_is_done_and_then_the_rest_is_drained():
    seen = []

    def nemesis(decide, over):
        seen.append(decide.random())
        over.wait()
        seen.append("over")

    def send(call):
        seen.append("draining" if call.draining else "working")
        return Answer(201)

    exercise(send, lambda key: 1, clients=2, keys=3, operations=20, seed=1, nemesis=nemesis)
    assert "working" in seen
    assert {*seen[seen.index("over") + 1 :]} == {"draining"}


def test_what_took_effect_after_the_last_answer_is_counted():
    """As a zombie's effect would: its worker goes on when everybody has been answered."""
    zombie = Timer(0.2, lambda: late.append("effect"))
    late = []

    def send(call):
        if not zombie.ident:
            zombie.start()
        return A

    verdict = exercise(send, lambda key: 1 + len(late), clients=1, keys=1, operations=1, seed=1, settle=0.5)
    assert [violation.law for violation in verdict.violations] == ["took effect 2 times"]


def test_a_key_that_was_answered_at_last_is_asked_for_once_more():
    answers = iter([A, B])
    verdict = exercise(lambda call: next(answers) if call.draining else ERROR, lambda key: 1, keys=1, operations=1)
    assert [violation.law for violation in verdict.violations] == ["was answered in different ways"]


def test_an_exception_is_no_answer_and_shown_where_it_was_the_last_word():
    def send(call):
        raise ConnectionError("the wire was cut")

    verdict = exercise(send, lambda key: 0, clients=2, keys=1, operations=4, seed=7, drain=0)
    assert verdict.counts[Kind.INFO] == verdict.counts[Kind.INVOKE]
    assert "was never answered" in str(verdict)
    assert "the wire was cut" in str(verdict)
    assert "seed 7" in str(verdict)


# --- Doors, on a real database ----------------------------------------------------------------------------------------


def tried(view):
    """The verdict on a view that pays the reference that is its key."""

    def send(call):
        try:
            answer = view(post(call.key, b'{"amount": %d}' % (5 + call.variant)))
        except Exception:
            return ERROR
        finally:
            connections.close_all()
        return Answer(answer.status_code, answer.content)

    return exercise(send, effects, clients=8, keys=20, operations=80, seed=1)


def key_of(request):
    return request.headers["Idempotency-Key"].strip('"')


def paying(request):
    return HttpResponse(pay(key_of(request)).id.hex, status=201)


def behind(protect):
    """A home-made door around ``paying``: ``protect(answers, request)``."""
    answers = {}
    return lambda request: protect(answers, request)


def looking_first(answers, request):
    """Without a lock: whoever looks before the first is done runs as well."""
    if key_of(request) not in answers:
        answer = paying(request)
        answers.setdefault(key_of(request), answer)
    return answers[key_of(request)]


def storing_before_commit(answers, request):
    """Every other transaction fails after its answer was stored."""
    if key_of(request) not in answers:
        with transaction.atomic():
            answers.setdefault(key_of(request), paying(request))
            if len(answers) % 2:
                raise ArithmeticError
    return answers[key_of(request)]


def answering_anew(answers, request):
    """The effect is there once, but the answer is made again for everybody."""
    if key_of(request) not in answers and answers.setdefault(key_of(request), request) is request:
        paying(request)
    return HttpResponse(uuid.uuid4().hex, status=201)


BROKEN = {
    "no door": (lambda answers, request: paying(request), "took effect"),
    "a look without a lock": (looking_first, "took effect"),
    "an answer stored before COMMIT": (storing_before_commit, "was answered, but did not take effect"),
    "an answer made anew": (answering_anew, "was answered in different ways"),
    "a key for whatever body": (looking_first, "was answered for different requests"),
}


@pytest.mark.row_locks
@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize(("protect", "law"), BROKEN.values(), ids=BROKEN)
def test_a_broken_door_is_caught(protect, law):
    verdict = tried(behind(protect))
    assert any(violation.law.startswith(law) for violation in verdict.violations), verdict


@pytest.mark.row_locks
@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_ours_holds(mode):
    protected = door(paying, mode=mode)
    verdict = tried(lambda request: protected(key_of(request), request.body))
    assert verdict.holds, verdict
    assert verdict.counts[Kind.FAIL]  # duplicates did meet, and other bodies were sent


def test_waiting_is_bounded():
    """A nemesis that ends by itself, and an endpoint that never answers: the drain gives up."""
    over = Event()
    verdict = exercise(
        lambda call: IN_FLIGHT, lambda key: 0, clients=2, keys=2, operations=4, nemesis=lambda *_: over.set(), drain=0.1
    )
    assert over.is_set()
    assert [violation.law for violation in verdict.violations] == ["was never answered"] * verdict.keys
