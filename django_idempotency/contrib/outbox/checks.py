"""System checks of the outbox, described in ``docs/outbox.md``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Value

from django_idempotency.checks import Check, Project, each
from django_idempotency.conf import Conf
from django_idempotency.contrib.outbox.conf import DEFAULT, make_publisher, options
from django_idempotency.contrib.outbox.maintenance import database
from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.models import DatabaseNow

LATE = timedelta(hours=1)


def why_unreadable(_settings: Conf) -> Exception | None:
    try:
        options()
    except (ImproperlyConfigured, TypeError) as error:
        return error
    return None


def broken_publishers(settings: Conf) -> Iterator[ImproperlyConfigured]:
    for alias in () if why_unreadable(settings) else options().publishers:
        try:
            make_publisher(alias)
        except ImproperlyConfigured as error:
            yield error


def lacks_default(settings: Conf) -> bool:
    return not why_unreadable(settings) and DEFAULT not in options().publishers


def late_events(project: Project) -> Iterator[tuple[str, bool]]:
    for using in {database() for settings in project.settings if not why_unreadable(settings)} & project.may_query:
        late = DatabaseNow() - Value(LATE)
        events = OutboxEvent.objects.using(using).filter(status=Status.PENDING, attempts=0, created_at__lt=late)
        if events.exists():
            yield using, True


CHECKS = (
    Check("E001", each("settings", why_unreadable), "{found}", "Correct OUTBOX in the IDEMPOTENCY setting."),
    Check(
        "E001", each("settings", broken_publishers), "{found}", "Correct its BACKEND and OPTIONS, or install its extra."
    ),
    Check(
        "W002",
        each("settings", lacks_default),
        f"OUTBOX has no publisher called {DEFAULT!r}: events whose topic matches no route are kept and never sent.",
        "Add one to PUBLISHERS.",
    ),
    Check(
        "W003",
        late_events,
        "Events of the outbox in the database {it!r} have been waiting for more than an hour.",
        "Run idempotency_outbox relay. See also idempotency_outbox status.",
        database=True,
        deploy=True,
    ),
)
