"""System checks of the outbox, described in ``docs/outbox.md``."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.checks import Check, each
from django_idempotency.conf import Conf
from django_idempotency.contrib.outbox.conf import DEFAULT, make_publisher, options


def why_unreadable(_settings: Conf) -> Exception | None:
    try:
        options()
    except (ImproperlyConfigured, TypeError) as error:
        return error
    return None


def errors(settings: Conf) -> Iterator[Exception]:
    if error := why_unreadable(settings):
        yield error
        return
    for alias in options().publishers:
        try:
            make_publisher(alias)
        except ImproperlyConfigured as error:
            yield error


def lacks_default(settings: Conf) -> bool:
    return not why_unreadable(settings) and DEFAULT not in options().publishers


CHECKS = (
    Check("E001", each("settings", errors), "{found}", "Correct OUTBOX, or install the extra that a publisher needs."),
    Check(
        "W002",
        each("settings", lacks_default),
        f"OUTBOX has no publisher called {DEFAULT!r}: events whose topic matches no route are kept and never sent.",
        "Add one to PUBLISHERS.",
    ),
)
