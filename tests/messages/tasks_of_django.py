"""Tasks of Django's own framework, which exists from Django 6.0 on."""

from __future__ import annotations

from typing import Any

from django.tasks import task

from django_idempotency.messages import Message
from django_idempotency.messages.django_tasks import idempotent_task
from tests.messages.handlers import pay


@task(takes_context=True)
@idempotent_task
def paying(context: Any, reference: str, *, fails: bool = False) -> dict[str, Any]:
    paid = pay(Message("task", reference), _First())
    if fails:
        raise LookupError("not yet")
    return {"paid": paid["paid"], "reference": reference}


class _First:
    attempt = 1
