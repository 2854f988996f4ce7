"""What the signals tell, and what they tell apart."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager

import pytest
from django.contrib.auth.mixins import LoginRequiredMixin
from django.db import connection
from django.dispatch import Signal
from django.http import HttpResponse
from django.views import View
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency import engine, maintenance, signals
from django_idempotency.decorators import idempotent
from django_idempotency.engine.background import background
from django_idempotency.engine.workers import Worker
from django_idempotency.exceptions import ClaimLost
from django_idempotency.messages import Message, RetryLater, consume
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.policy import Atomic, Lease, Policy
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import InFlight, Keep, StoredResponse
from tests.support.callers import claim, effects, entry_point, heard, is_replay, operation, pay, paying, record, shift
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("payer")

LEASE = {"mode": Lease(seconds=60)}
DONE = StoredResponse(201, body=b"the rival's")


@pytest.fixture
def losses():
    """What is sent by each of the two signals of a claim that is lost."""
    with heard(signals.claim_lost) as lost, heard(signals.stale_write_rejected) as rejected:
        yield lost, rejected


def overtaken(**policy):
    """Let the lease run out, and have a rival take over and complete."""
    shift(locked_until=-1)
    policy = Policy(**policy)
    assert store_for(policy).complete(claim(policy=policy), DONE)


def test_a_rival_before_the_row_lock_is_a_lost_claim(losses):
    policy = Policy(mode=Atomic(takeover_grace=0))
    late, owner = claim(policy=policy), claim(policy=policy)
    with pytest.raises(ClaimLost), engine.execution(late, policy):
        pay()
    engine.duplicate(operation(), policy)
    lost, rejected = losses
    assert ([sent["attempt"] for sent in lost], rejected) == ([late.attempt], [])
    with engine.execution(owner, policy) as run:
        run.verdict = Keep(DONE)
    assert (len(lost), rejected, effects()) == (1, [], 0)


def test_an_owner_that_comes_back_late_is_a_stale_write(losses):
    def view(request):
        overtaken(**LEASE)
        return paying(request)

    with heard(signals.response_replayed) as replays:
        assert entry_point(view, **LEASE)().content == DONE.body
    assert [sent["response"] for sent in replays] == [DONE]
    lost, rejected = losses
    assert (lost, [sent["attempt"] for sent in rejected]) == ([], [1])


@pytest.mark.parametrize("how", ["renews", "fails"])
def test_a_late_owner_is_counted_once_however_it_finds_out(losses, how):
    def view(request):
        overtaken(**LEASE)
        if how == "renews":
            request.idempotency.renew()
        raise ArithmeticError

    with ExitStack() as stack:
        if how == "fails":
            stack.enter_context(pytest.raises(ArithmeticError))
        assert is_replay(entry_point(view, **LEASE)())
    lost, rejected = losses
    assert (lost, len(rejected)) == ([], 1)


@pytest.mark.postgresql
def test_a_late_owner_in_atomic_mode_is_signalled_after_its_rollback(other_thread):
    in_transaction = []

    def hear(**named):
        in_transaction.append(connection.in_atomic_block)

    def view(request):
        response = paying(request)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (backend,) = cursor.fetchone()
        other_thread(lambda: connection.cursor().execute("SELECT pg_terminate_backend(%s, 5000)", [backend]))
        assert other_thread(entry_point(paying)).status_code == 201
        return response

    signals.stale_write_rejected.connect(hear)
    try:
        assert is_replay(entry_point(view)())
    finally:
        signals.stale_write_rejected.disconnect(hear)
    assert (in_transaction, effects()) == ([False], 1)


@pytest.mark.parametrize(
    ("signal", "answer", "raises"),
    [
        (signals.key_completed, HttpResponse(status=201), False),
        (signals.key_released, HttpResponse(status=422), False),
        (signals.key_failed, None, True),
    ],
    ids=["completed", "released", "failed"],
)
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_run_tells_how_long_it_took(mode, signal, answer, raises):
    inside = []

    def view(request):
        entered = time.monotonic()
        pay()
        inside.append(time.monotonic() - entered)
        if raises:
            raise ArithmeticError
        return answer

    began = time.monotonic()
    with heard(signal) as sent, ExitStack() as stack:
        if raises:
            stack.enter_context(pytest.raises(ArithmeticError))
        entry_point(view, mode=mode)()
    (seconds,) = (each["seconds"] for each in sent)
    assert inside[0] <= seconds <= time.monotonic() - began


@contextmanager
def all_heard():
    """The names of what is sent, in order, with what is told besides the operation."""
    sent, hearers = [], []
    for name, signal in vars(signals).items():
        if isinstance(signal, Signal):

            def hear(*, sender, operation, name=name, signal, **told):
                sent.append((name, told))

            signal.connect(hear)
            hearers.append((signal, hear))
    try:
        yield sent
    finally:
        for signal, hear in hearers:
            signal.disconnect(hear)


def test_each_outcome_of_a_claim_sends_one_signal_with_its_arguments():
    holding, waiting = Policy(mode=Lease(on_crash="hold")), Policy(**LEASE, wait=0.05)
    with all_heard() as sent:
        claim("crashed", policy=holding)
        assert engine.claim(operation("crashed"), holding) == InFlight(1)
        assert engine.claim(operation("crashed"), waiting) == InFlight(1)
        engine.claim(operation("crashed", b"another body"), holding)
        shift("crashed", locked_until=-1)
        engine.claim(operation("crashed"), holding)
        claim("retried", policy=Policy(**LEASE))
        shift("retried", locked_until=-1)
        retried = claim("retried", policy=Policy(**LEASE))
        assert store_for(holding).complete(retried, DONE)
        engine.claim(operation("retried"), holding)
    assert sent == [
        ("key_claimed", {"attempt": 1}),
        ("request_rejected", {"reason": "in_flight", "retry_after": 1}),
        ("request_rejected", {"reason": "wait_timeout", "retry_after": 1}),
        ("request_rejected", {"reason": "key_reused"}),
        ("request_rejected", {"reason": "on_hold", "hold_reason": engine.decisions.LEASE_LAPSED}),
        ("key_claimed", {"attempt": 1}),
        ("key_taken_over", {"attempt": 2}),
        ("response_replayed", {"response": DONE}),
    ]


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_each_outcome_of_a_run_sends_one_signal_with_its_arguments(mode):
    answers = [HttpResponse(b"refused", status=422), ArithmeticError("asked for"), HttpResponse(b"paid", status=201)]

    def view(request):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    send = entry_point(view, mode=mode)
    with all_heard() as sent:
        send()
        with pytest.raises(ArithmeticError):
            send()
        send()
    assert [told.pop("seconds", 0) > 0 for _name, told in sent] == [False, True] * 3
    assert sent[-1][1].pop("response").body == b"paid"
    assert sent == [
        ("key_claimed", {"attempt": 1}),
        ("key_released", {}),
        ("key_claimed", {"attempt": 1}),
        ("key_failed", {"reason": "ArithmeticError"}),
        ("key_claimed", {"attempt": 2}),
        ("key_completed", {}),
    ]


def test_a_replay_is_counted_in_the_background(monkeypatch):
    monkeypatch.setattr("django_idempotency.engine.background.in_test_run", lambda: False)
    monkeypatch.setattr(Worker, "wake", lambda self: None)  # it works when told
    send = entry_point(paying)
    for _time in range(3):
        send()
    in_threads(1, lambda _: background.work())
    assert record().replays == 2


def plain(request):
    return HttpResponse(status=201)


class Plain(LoginRequiredMixin, View):
    def post(self, request):
        return HttpResponse(status=201)


class Api(APIView):
    permission_classes = ()

    def post(self, request):
        return Response(status=201)


class Mixed(IdempotentMixin, Api):
    idempotency_policy = Policy(scope="public")


WAYS = {
    "mixin": (Mixed.as_view(), "Mixed"),
    "decorator, function": (idempotent(plain), "plain"),
    "decorator, class": (idempotent(Plain).as_view(), "Plain.post"),
    "decorator, as_view": (idempotent(Plain.as_view()), "Plain.post"),
    "decorator, REST framework": (idempotent(scope="public")(Api).as_view(), "Api"),
    "middleware, function": (plain, "plain"),
    "middleware, class": (Plain.as_view(), "Plain.post"),
    "middleware, REST framework": (Api.as_view(), "Api"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_operation_names_its_entry_point_and_its_view(way, call, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE]
    assert settings.MIDDLEWARE[-1].endswith(IdempotencyMiddleware.__name__)
    settings.IDEMPOTENCY = {"SCOPE": "public"}
    view, name = WAYS[way]
    with heard(signals.key_claimed) as sent:
        assert call(view, {"amount": 1}).status_code == 201
    (told,) = (each["operation"] for each in sent)
    assert (told.entry_point, told.view) == (way.partition(",")[0], f"{__name__}.{name}")


def handle(message, context):
    return None


class Handler:
    def __call__(self, message, context):
        return None


@pytest.mark.parametrize(("handler", "name"), [(handle, "handle"), (Handler(), "Handler")])
def test_a_message_names_its_handler(handler, name):
    with heard(signals.key_claimed) as sent:
        consume(Message("queue", "1"), handler)
    (told,) = (each["operation"] for each in sent)
    assert (told.entry_point, told.view) == ("consumer", f"{__name__}.{name}")


def test_a_key_reaped_by_maintenance_has_no_view():
    claim(policy=Policy(**LEASE))
    shift(locked_until=-1)
    with heard(signals.key_reaped) as sent:
        maintenance.reap()
    (told,) = (each["operation"] for each in sent)
    assert (told.entry_point, told.view) == ("maintenance", "")


def test_a_message_that_finds_no_store_sends_store_failed(other_thread, monkeypatch):
    with heard(signals.store_failed) as sent, monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert isinstance(other_thread(consume, Message("queue", "1"), handle), RetryLater)
    assert [each["operation"].scope for each in sent] == ["consumer:default:queue"]
