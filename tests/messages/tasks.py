"""Tasks that do what real ones do to the way back to their broker."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject
from celery.signals import worker_process_init
from celery.worker.request import Request
from django.contrib.auth import get_user_model

from django_idempotency.engine import background
from django_idempotency.messages.celery import idempotent_task
from django_idempotency.signals import request_rejected
from django_idempotency.values.policy import Atomic
from testproject.models import LedgerEntry
from tests.support.waiting import eventually

logger = logging.getLogger(__name__)
LATE = {"acks_late": True, "reject_on_worker_lost": True}


@worker_process_init.connect
def exit_patiently(**_named: Any) -> None:
    """A child of a busy machine may need longer for what it writes at its end."""
    background.PATIENCE_AT_EXIT = 60.0


@worker_process_init.connect
def log_rejections(**_named: Any) -> None:
    request_rejected.connect(log_rejection)


def log_rejection(*, reason: str, **_named: Any) -> None:
    logger.warning("rejected: %s", reason)


def pay(reference: str, amount: int = 5) -> None:
    user = get_user_model().objects.get(username="carol")
    LedgerEntry.objects.create(
        kind=LedgerEntry.Kind.CHARGE, user=user, amount=amount, reference=reference
    )


@shared_task(**LATE)
@idempotent_task
def typed(reference: str) -> Any:
    pay(reference)
    return {"amount": Decimal("1.10"), "raw": b"\xff\x00"}


@shared_task(**LATE)
@idempotent_task
def large(reference: str) -> str:
    pay(reference)
    return "x" * 2_000_000


@shared_task(bind=True, default_retry_delay=0, **LATE)
@idempotent_task
def retries_with_other_arguments(
    task: Any, reference: str, amount: int, end: str
) -> dict[str, int]:
    pay(reference, amount)
    if task.request.retries == 0:
        try:
            task.retry(
                kwargs={"reference": reference, "amount": amount + 1, "end": end}
            )
        finally:  # the retry is on its way already
            eventually(Path(end).exists)
    return {"amount": amount}


@shared_task(bind=True, **LATE)
@idempotent_task(max_crashes=2)
def asks_its_broker_to_come_again(task: Any, reference: str, directory: str) -> str:
    pay(reference)
    calls = Path(directory) / "calls"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size < 5:
        raise Reject(requeue=True)
    return reference


@shared_task(bind=True, **LATE)
@idempotent_task
def replaces_itself(task: Any, reference: str, left: int) -> Any:
    pay(f"{reference}-{left}")
    if left:
        queue = task.request.delivery_info["routing_key"]
        return task.replace(task.s(reference, left - 1).set(queue=queue))
    return "replaced"


@shared_task(**LATE)
@idempotent_task
def ends_itself(reference: str) -> None:
    pay(reference)
    raise Ignore


@shared_task(**LATE)
@idempotent_task
def child(reference: str) -> str:
    pay(reference)
    return reference


@shared_task(**LATE)
@idempotent_task
def runs_children(reference: str) -> list[str]:
    return [child.run(f"{reference}-{number}") for number in range(2)]


@shared_task(**LATE)
def plain_runs_children(reference: str) -> list[str]:
    return [child.run(f"{reference}-{number}") for number in range(2)]


@shared_task(**LATE)
@idempotent_task(max_crashes=3)
def exits(reference: str) -> None:
    logger.warning("ends %s", reference)
    sys.exit(1)


@shared_task(**LATE)
@idempotent_task(max_crashes=3, mode=Atomic(claim="lock"))
def dies_by_lock(reference: str) -> None:
    logger.warning("ends %s", reference)
    os.kill(os.getpid(), signal.SIGKILL)


@shared_task
@idempotent_task
def dawdles_and_has_acknowledged(reference: str, directory: str) -> str:
    pay(reference)
    logger.warning("dawdles %s", reference)
    eventually((Path(directory) / "end").exists, within=120)
    return reference


@shared_task(**LATE)
@idempotent_task
def charges_and_waits(reference: str, directory: str) -> dict[str, str]:
    pay(reference)
    logger.warning("charged %s", reference)
    eventually((Path(directory) / "end").exists, within=120)
    return {"entry": str(LedgerEntry.objects.get(reference=reference).pk)}


@shared_task(**LATE)
@idempotent_task
def refuses(reference: str) -> None:
    pay(reference)
    raise LookupError(reference)


@shared_task
@idempotent_task
def refuses_and_has_acknowledged(reference: str) -> None:
    raise LookupError(reference)


def opaque(function: Any) -> Any:
    """A decorator that shows nothing of what it wraps."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@shared_task(name="tests.messages.tasks.hidden")
@opaque
@idempotent_task
def hidden(reference: str) -> None:
    raise LookupError(reference)


class CountedRequest(Request):
    """A project's own."""

    def on_failure(self, exc_info: Any, *arguments: Any, **named: Any) -> Any:
        logger.warning("a request of the project's failed")
        return super().on_failure(exc_info, *arguments, **named)


@shared_task(Request=CountedRequest)
@idempotent_task
def fails_by_a_request_of_its_own(reference: str) -> None:
    raise LookupError(reference)


@shared_task(**LATE)
@idempotent_task(key="charge-{reference}", retention=None)
def charge_once(reference: str, amount: int = 5) -> dict[str, str]:
    pay(reference, amount)
    logger.warning("charges %s", reference)
    time.sleep(0.02)
    return {"entry": str(LedgerEntry.objects.get(reference=reference).pk)}


@shared_task(bind=True, **LATE)
@idempotent_task(key="{directory}", retention=3600, max_crashes=2)
def does_as_told(task: Any, directory: str) -> str:
    """Fail, end its worker or return, as a file says."""
    word = (Path(directory) / "word").read_text()
    logger.warning("%s %s", word, task.request.id)
    if word == "fail":
        raise LookupError(directory)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return word


@shared_task(**LATE)
@idempotent_task(key="tick-{task_id}", retention=3600)
def ticks() -> str:
    pay("tick")
    return "ticked"
