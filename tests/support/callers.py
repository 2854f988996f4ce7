"""Call a view behind an entry point without a server, and read what is left of it:
effects, and the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.contrib.auth import get_user_model
from django.core.handlers.base import BaseHandler
from django.db import connections
from django.dispatch import Signal
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.test import RequestFactory, override_settings
from django.urls import path

from django_idempotency import engine
from django_idempotency.engine import leases
from django_idempotency.engine.background import Worker, background
from django_idempotency.http.placement import idempotent
from django_idempotency.http.requests import identify
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Claimed, Operation, Verdict
from django_idempotency.values.policy import Atomic, Lease, Policy
from django_idempotency.values.rules import rules
from testproject.models import LedgerEntry

SCOPE = "public"
BODY = b'{"amount": 5}'
PAYER = "payer"
MODES = ("atomic", "lease")


def post(
    key: str = "k",
    body: bytes = BODY,
    path: str = "/pay/",
    content_type: str = "application/json",
) -> Any:
    """A request with ``key``, of nobody in particular."""
    return RequestFactory().post(
        path, body, content_type, headers={"Idempotency-Key": f'"{key}"'}
    )


def entry_point(
    view: Callable[..., HttpResponseBase], **policy: Any
) -> Callable[..., Any]:
    """``view`` behind ``@idempotent``; takes what ``post`` takes."""
    protected = idempotent(**{"scope": SCOPE} | policy)(view)
    return lambda *args, **sent: protected(post(*args, **sent))


def behind_middleware(
    view: Callable[..., HttpResponseBase],
) -> Callable[[Any], HttpResponseBase]:
    """``view`` behind ``IdempotencyMiddleware`` alone, served as Django does; takes a
    request that ``post`` makes.
    """
    ours = "django_idempotency.middleware.IdempotencyMiddleware"

    def serve(request: Any) -> HttpResponseBase:
        with override_settings(MIDDLEWARE=[ours], ROOT_URLCONF=(path("pay/", view),)):
            handler = BaseHandler()
            handler.load_middleware()
            return handler.get_response(request)

    return serve


def operation(*args: Any, **sent: Any) -> Operation:
    """What such a ``post`` asks for."""
    found = identify(post(*args, **sent), Policy(scope=SCOPE), sender=None)
    assert found is not None
    return found


def claim(*args: Any, policy: Policy, **sent: Any) -> Claimed:
    """The claim of such a ``post``, by somebody who goes no further."""
    outcome = engine.claim(operation(*args, **sent), policy)
    assert isinstance(outcome, Claimed), outcome
    return outcome


def settle(claim: Claimed, policy: Policy, verdict: Verdict) -> None:
    """Run what was claimed, with this end."""
    with engine.execution(claim, policy) as run:
        run.verdict = verdict


def pay(reference: str = "r") -> LedgerEntry:
    """One effect."""
    payer = get_user_model().objects.get(username=PAYER)
    return LedgerEntry.objects.create(
        kind="order", user=payer, amount=5, currency="EUR", reference=reference
    )


def paying(request: Any) -> HttpResponse:
    """A view with one effect, whose answer differs with every run."""
    return HttpResponse(pay().id.hex, status=201)


def effects(reference: str = "r") -> int:
    """How many have committed."""
    return LedgerEntry.objects.filter(reference=reference).count()


def references() -> list[str]:
    """Of the effects, in the order in which they were made."""
    made = LedgerEntry.objects.order_by("created_at")
    return list(made.values_list("reference", flat=True))


def all_effects() -> int:
    """How many have committed, whatever their reference."""
    return LedgerEntry.objects.count()


def payment(reference: str, amount: int = 5) -> dict[str, Any]:
    """What the test project's endpoints take."""
    return {"amount": amount, "currency": "EUR", "reference": reference}


def record(key: str = "k", scope: str = SCOPE) -> IdempotencyRecord | None:
    return IdempotencyRecord.objects.filter(pk=record_id(scope, key)).first()


def row(key: str = "k", scope: str = SCOPE) -> Any:
    """All columns of the record, to be compared."""
    return IdempotencyRecord.objects.filter(pk=record_id(scope, key)).values().get()


def shift(key: str = "k", **seconds: float) -> None:
    """Set times of the record, so many seconds from the database's now:
    ``shift(locked_until=-1)``.
    """
    # a lease that was found expired ends where it began
    if seconds.get("locked_until", 1) < 0:
        seconds = {"locked_at": seconds["locked_until"]} | seconds
    times = {name: ahead(offset) for name, offset in seconds.items()}
    assert (
        IdempotencyRecord.objects.filter(pk=record_id(SCOPE, key)).update(**times) == 1
    )


def stop(worker: Worker) -> None:
    """Have a thread forget what it owes, and end."""
    with worker.changed:
        for owed in ("_leases", "_suspects", "_replays", "_work"):
            vars(worker).get(owed, {}).clear()
        worker.changed.notify_all()
    worker.join(60)


def stop_heartbeat() -> None:
    for worker in (background, *leases._keepers.values()):
        stop(worker)


@contextmanager
def when(signal: Signal, act: Callable[..., Any]) -> Iterator[None]:
    """Have ``signal`` call ``act`` inside the block."""
    signal.connect(act)
    try:
        yield
    finally:
        signal.disconnect(act)


@contextmanager
def heard(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """What is sent by ``signal`` inside the block."""
    sent: list[dict[str, Any]] = []
    with when(signal, lambda **named: sent.append(named)):
        yield sent


# Headers that a replay has and the first response did not have.
OF_A_REPLAY = {"Idempotent-Replayed": "true", "Cache-Control": "no-store"}


def is_replay(response: HttpResponseBase) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


class Gate:
    """A view that pays, and waits until it is let go. ``prepare`` is called first by
    the thread that it runs in.
    """

    def __init__(self, prepare: Callable[[], Any] = lambda: None) -> None:
        self.entered, self.let_go, self.prepare = (
            threading.Event(),
            threading.Event(),
            prepare,
        )

    def __call__(self, request: Any) -> HttpResponse:
        response = paying(request)
        self.entered.set()
        assert self.let_go.wait(120)
        return response

    @contextmanager
    def running(self, **policy: Any) -> Iterator[Future[Any]]:
        """The view runs, in a thread, until the block is left; its answer is a
        future.
        """
        with self.running_with("k", **policy) as answer:
            yield answer

    @contextmanager
    def running_with(self, key: str, **policy: Any) -> Iterator[Future[Any]]:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._send, key, policy)
            try:
                assert self.entered.wait(60)
                yield answer
            finally:
                self.let_go.set()

    def _send(self, key: str, policy: dict[str, Any]) -> Any:
        try:
            self.prepare()
            return entry_point(self, **policy)(key)
        finally:
            connections.close_all()


GROUPS = {"atomic": Atomic, "lease": Lease}


def mode_of(word: str, **options: Any) -> Atomic | Lease:
    """Return the mode called ``word``, with those of ``options`` that it has; ``lease``
    are the seconds of a lease.
    """
    group: type[Atomic | Lease] = GROUPS[word]
    if "lease" in options:
        options["seconds"] = options.pop("lease")
    return group(
        **{name: options[name] for name in options.keys() & rules(group).keys()}
    )
