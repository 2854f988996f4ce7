"""System checks of the outbox, described in ``docs/checks.md``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Value

from django_idempotency.models import DatabaseNow
from django_idempotency.outbox.conf import DEFAULT, make_publisher, options
from django_idempotency.outbox.maintenance import database
from django_idempotency.outbox.models import OutboxEvent, Status

Apps = Sequence[AppConfig] | None
LATE = timedelta(hours=1)


@register(Tags.compatibility)
def check_options(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E060 impossible options; E061 publishers that can't be made; W062 no default."""
    try:
        stated = options()
    except (ImproperlyConfigured, TypeError) as error:
        return [Error(str(error), hint="Correct OUTBOX in the IDEMPOTENCY setting.", id="django_idempotency.E060")]
    return [*_publishers(stated.publishers), *_default(stated.publishers)]


def _publishers(aliases: Collection[str]) -> list[CheckMessage]:
    errors = []
    for alias in aliases:
        try:
            make_publisher(alias)
        except ImproperlyConfigured as error:
            hint = "Correct its BACKEND and OPTIONS, or install its extra."
            errors.append(Error(str(error), hint=hint, id="django_idempotency.E061"))
    return list[CheckMessage](errors)


def _default(aliases: Collection[str]) -> list[CheckMessage]:
    if DEFAULT in aliases:
        return []
    return [
        Warning(
            "OUTBOX has no publisher called 'default': events whose topic matches no route are kept and never sent.",
            hint="Add one to PUBLISHERS.",
            id="django_idempotency.W062",
        )
    ]


@register(Tags.database, deploy=True)
def check_backlog(app_configs: Apps, databases: Collection[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W063 events that have been waiting for more than an hour."""
    try:
        using = database()
    except ImproperlyConfigured:
        return []
    if using not in (databases or ()):
        return []
    late = OutboxEvent.objects.using(using).filter(
        status=Status.PENDING, attempts=0, created_at__lt=DatabaseNow() - Value(LATE)
    )
    if not late.exists():
        return []
    return [
        Warning(
            f"Events of the outbox in the database {using!r} have been waiting for more than an hour.",
            hint="Run idempotency_relay. See also idempotency_outbox status.",
            id="django_idempotency.W063",
        )
    ]
