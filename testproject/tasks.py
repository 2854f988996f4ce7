"""The tasks that the service leaves to a worker."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import shared_task
from django.contrib.auth import get_user_model

from django_idempotency.messages.celery import idempotent_task
from testproject.models import LedgerEntry

logger = logging.getLogger(__name__)


class BankClosed(Exception):
    """A temporary fault, which the first attempts meet if they are told to."""


def _pay(username: str, amount: int, reference: str) -> dict[str, Any]:
    user = get_user_model().objects.get(username=username)
    entry = LedgerEntry.objects.record(
        kind=LedgerEntry.Kind.CHARGE, user=user, amount=amount, reference=reference
    )
    return {"id": str(entry.pk), "amount": amount}


@shared_task(acks_late=True, reject_on_worker_lost=True)
@idempotent_task
def charge(
    username: str, amount: int, reference: str, *, delay_ms: int = 0
) -> dict[str, Any]:
    """Charge once, however often the broker delivers this. Wait for ``delay_ms`` after
    the effect was written.
    """
    paid = _pay(username, amount, reference)
    logger.warning("charged %s", reference)
    time.sleep(delay_ms / 1000)
    return paid


@shared_task(
    bind=True, acks_late=True, reject_on_worker_lost=True, default_retry_delay=0
)
@idempotent_task
def charge_when_open(
    task: Any, username: str, amount: int, reference: str, *, closed: int = 0
) -> dict[str, Any]:
    """Write, but find the bank closed the first ``closed`` times, and ask for a
    retry.
    """
    paid = _pay(username, amount, reference)
    if task.request.retries < closed:
        raise task.retry(exc=BankClosed(reference))
    return paid


@shared_task(
    bind=True,
    acks_late=True,
    autoretry_for=(BankClosed,),
    retry_backoff=False,
    default_retry_delay=0,
)
@idempotent_task
def charge_and_autoretry(
    task: Any, username: str, amount: int, reference: str, *, closed: int = 0
) -> dict[str, Any]:
    """Do the same by Celery's ``autoretry_for``."""
    paid = _pay(username, amount, reference)
    if task.request.retries < closed:
        raise BankClosed(reference)
    return paid
