"""The public API as type checkers see it: nothing here runs, mypy reads it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, assert_type

from django.http import HttpRequest, HttpResponse
from django.views import View
from rest_framework.views import APIView

from django_idempotency import IdempotentRequest, once, run_once
from django_idempotency.engine import Context
from django_idempotency.forms import idempotent_form
from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.messages.celery import idempotent_task
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.exceptions import TerminalFailure
from django_idempotency.values.policy import Atomic, Body, Lease, Policy


@idempotent
def bare(request: HttpRequest, pk: int) -> HttpResponse:
    raise TerminalFailure(HttpResponse(status=409))


@idempotent(
    required=True,
    mode=Lease(on_crash="hold"),
    scope=lambda request: request.headers.get("X-Tenant"),
)
def with_options(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@idempotency_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@idempotent(mode="lease", wait=timedelta(seconds=5))
async def asynchronous(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@idempotent_form(retention=timedelta(days=1))
def form(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@idempotent_task(mode="lease", max_crashes=3)
def task(number: int) -> str:
    return str(number)


@once(key="charge-{number}", retention=None, name="charge")
def charge_once(number: int) -> str:
    return str(number)


assert_type(charge_once(7), str)
assert_type(run_once("k", lambda: 7, retention=60, name="k"), int)


@idempotent
class Order(View):
    number = 7


class Charge(IdempotentMixin, APIView):
    idempotency_policy = Policy(
        required=True, methods={"POST"}, fingerprint=lambda request: request.body
    )


@idempotent
def keyed_or_not(request: IdempotentRequest) -> HttpResponse:
    assert_type(request.idempotency.child_key("gateway"), str)
    if request.idempotency:
        assert_type(request.idempotency, Context)
    return HttpResponse(request.idempotency.key)


def seen(context: Context) -> None:
    assert_type(context.key, str)
    assert_type(context.scope, str)
    assert_type(context.attempt, int)
    assert_type(context.child_key("gateway"), str)
    context.renew()


assert_type(bare(HttpRequest(), 7), HttpResponse)
assert_type(with_options(HttpRequest()), HttpResponse)
assert_type(exempt(HttpRequest()), HttpResponse)
assert_type(form(HttpRequest()), HttpResponse)
assert_type(task(7), str)
assert_type(Order.number, int)
assert_type(Policy(retention=timedelta(days=1)).retention, float)
assert_type(Policy().wait, float | None)
assert_type(Policy(mode="lease").mode, Atomic | Lease)
view: Callable[..., Any] = Order.as_view()
entry_point: Callable[[HttpRequest], HttpResponse] = exempt


# Each of these is an error; one that mypy lets pass is reported as an unused comment.
bare("request")  # type: ignore[arg-type, call-arg]
idempotent(mood="lease")  # type: ignore[call-overload]
Lease(seconds="60")  # type: ignore[arg-type]
idempotent(mode="leese")  # type: ignore[call-overload]
idempotent_task(mode="leese")  # type: ignore[call-overload]
idempotent_form(required="yes")  # type: ignore[call-overload]
Body(encrypt="required")  # type: ignore[arg-type]
Policy(required="yes")  # type: ignore[arg-type]
Policy(True)  # type: ignore[call-arg]
Policy().retention = 5  # type: ignore[misc]
TerminalFailure("text")  # type: ignore[arg-type]
