"""What the signals and the log tell, and what they tell apart."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from django.contrib.auth.mixins import LoginRequiredMixin
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, OperationalError, connection
from django.dispatch import Signal
from django.http import HttpResponse
from django.views import View
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency import engine, instrumentation, maintenance, signals
from django_idempotency.http.placement import idempotent
from django_idempotency.instrumentation import prometheus
from django_idempotency.messages import Message, RetryLater, consume
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.reporting.logs import cause
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import InFlight, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from tests.instrumentation.metered import KEY, SECRET, SECRET_SCOPE, everything, scraped
from tests.support.callers import (
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    operation,
    paying,
    shift,
)
from tests.support.sql import run_sql, value_of

pytestmark = pytest.mark.usefixtures("payer")

LEASE = {"mode": Lease(seconds=60)}
DONE = StoredResponse(201, body=b"the rival's")


@pytest.fixture
def losses():
    """What is sent by each of the two signals of a claim that is lost."""
    with (
        heard(signals.claim_lost) as lost,
        heard(signals.stale_write_rejected) as rejected,
    ):
        yield lost, rejected


def overtaken(**policy):
    """Let the lease run out, and have a rival take over and complete."""
    shift(locked_until=-1)
    policy = Policy(**policy)
    assert store_for(policy).complete(claim(policy=policy), DONE)


@pytest.mark.parametrize("how", ["responds", "renews", "fails"])
def test_a_late_owner_is_counted_once_however_it_finds_out(losses, how):
    def view(request):
        overtaken(**LEASE)
        if how == "responds":
            return paying(request)
        if how == "renews":
            request.idempotency.renew()
        raise ArithmeticError

    with ExitStack() as stack:
        replays = stack.enter_context(heard(signals.response_replayed))
        if how == "fails":
            stack.enter_context(pytest.raises(ArithmeticError))
        assert entry_point(view, **LEASE)().content == DONE.body
    assert [sent["response"] for sent in replays] == ([] if how == "fails" else [DONE])
    lost, rejected = losses
    assert (lost, [sent["attempt"] for sent in rejected]) == ([], [1])


@pytest.mark.postgresql
def test_a_late_owner_in_atomic_mode_is_signalled_after_its_rollback(other_thread):
    in_transaction = []

    def hear(**named):
        in_transaction.append(connection.in_atomic_block)

    def view(request):
        response = paying(request)
        backend = value_of("SELECT pg_backend_pid()")
        other_thread(run_sql, "SELECT pg_terminate_backend(%s, 30000)", [backend])
        assert other_thread(entry_point(paying)).status_code == 201
        return response

    signals.stale_write_rejected.connect(hear)
    try:
        assert is_replay(entry_point(view)())
    finally:
        signals.stale_write_rejected.disconnect(hear)
    assert (in_transaction, effects()) == ([False], 1)


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
    # so short a lease that a caller is told to come back in a second, however late
    holding = Policy(mode=Lease(seconds=10, on_crash="hold"))
    waiting = Policy(mode=Lease(seconds=10), wait=0.05)
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
        (
            "request_rejected",
            {"reason": "on_hold", "hold_reason": engine.decisions.LEASE_LAPSED},
        ),
        ("key_claimed", {"attempt": 1}),
        ("key_taken_over", {"attempt": 2}),
        ("response_replayed", {"response": DONE}),
    ]


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_each_outcome_of_a_run_sends_one_signal_with_its_arguments(mode):
    answers = [
        HttpResponse(b"refused", status=422),
        ArithmeticError("asked for"),
        HttpResponse(b"paid", status=201),
    ]

    def view(request):
        time.sleep(0.01)
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    send, began = entry_point(view, mode=mode), time.monotonic()
    with all_heard() as sent:
        send()
        with pytest.raises(ArithmeticError):
            send()
        send()
    seconds = [told.pop("seconds", 0) for _name, told in sent]
    assert [each >= 0.01 for each in seconds] == [False, True] * 3
    assert sum(seconds) <= time.monotonic() - began
    assert sent[-1][1].pop("response").body == b"paid"
    assert sent == [
        ("key_claimed", {"attempt": 1}),
        ("key_released", {}),
        ("key_claimed", {"attempt": 1}),
        ("key_failed", {"reason": "ArithmeticError"}),
        ("key_claimed", {"attempt": 2}),
        ("key_completed", {}),
    ]


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
    assert (told.entry_point, told.view) == (
        way.partition(",")[0],
        f"{__name__}.{name}",
    )


def handle(message, context):
    return None


class Handler:
    def __call__(self, message, context):
        return None


@pytest.mark.parametrize(
    ("handler", "name"), [(handle, "handle"), (Handler(), "Handler")]
)
def test_a_message_names_its_handler(handler, name):
    with heard(signals.key_claimed) as sent:
        consume(Message("queue", "1"), handler)
    (told,) = (each["operation"] for each in sent)
    assert (told.entry_point, told.view) == ("consumer", f"{__name__}.{name}")


def test_a_key_reaped_by_maintenance_is_reported_without_a_view():
    claim(policy=Policy(**LEASE))
    shift(locked_until=-1)
    with heard(signals.key_reaped) as sent:
        maintenance.reap()
    (told,) = (each["operation"] for each in sent)
    assert (told.entry_point, told.view) == ("maintenance", "")


def test_a_message_whose_store_is_unavailable_sends_store_failed(
    other_thread, monkeypatch
):
    with heard(signals.store_failed) as sent, monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert isinstance(
            other_thread(consume, Message("queue", "1"), handle), RetryLater
        )
    assert [each["operation"].scope for each in sent] == ["consumer:default:queue"]


def test_log_records_have_fields_without_secrets(caplog, registry):
    caplog.set_level(logging.DEBUG, "django_idempotency")
    everything()
    records = [
        record for record in caplog.records if record.name == "django_idempotency"
    ]
    assert [(record.event, record.levelname) for record in records] == [
        ("request_rejected", "WARNING"),
        ("key_taken_over", "WARNING"),
    ]
    assert all(f"[{record.view}]" in record.getMessage() for record in records)
    assert {(record.entry_point, record.view) for record in records} == {
        ("decorator", "tests.support.callers.paying")
    }
    assert records[-1].attempt == 2
    assert records[-1].record_id == str(operation("reaped").id)
    told = " ".join(str(record.__dict__) for record in records) + scraped(registry)
    assert [secret for secret in (KEY, SECRET_SCOPE, SECRET) if secret in told] == []


def test_a_refusal_that_a_caller_repeats_is_logged_once_a_minute(caplog):
    send = entry_point(paying)
    send("first"), send("second")
    with (
        caplog.at_level(logging.WARNING, "django_idempotency"),
        heard(signals.request_rejected) as rejected,
    ):
        statuses = {
            send(key, body=b"{}").status_code
            for key in ("first", "second")
            for _time in range(3)
        }
    assert (statuses, len(rejected)) == ({422}, 6)
    assert [record.reason for record in caplog.records] == ["key_reused"] * 2


@pytest.mark.postgresql
def test_an_error_of_the_database_is_logged_without_what_it_quotes():
    with pytest.raises(DataError) as raised:
        run_sql("SELECT %s::integer", [SECRET])
    assert SECRET in str(raised.value)
    assert cause(raised.value) == "DataError 22P02"


def test_an_error_on_the_way_to_the_database_is_logged_as_it_is(
    other_thread, monkeypatch
):
    def fail():
        with pytest.raises(OperationalError) as raised:
            connection.ensure_connection()
        return cause(raised.value)

    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert other_thread(fail).startswith("OperationalError")


@pytest.mark.parametrize("wrong", ["prometheus", ["prometeus"], [1]])
def test_an_unknown_instrumentation_is_left_to_the_checks(wrong, settings):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": wrong}
    instrumentation.install()


def test_a_library_that_is_missing_is_named(settings, monkeypatch):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": ["prometheus"]}
    name = prometheus.__name__
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(
            ImproperlyConfigured, match=r"django-idempotency\[prometheus\]"
        ):
            instrumentation.install()
