"""System checks of the outbox, described in ``docs/outbox.md``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.contrib.outbox.conf import DEFAULT, make_publisher, options
from django_idempotency.extending.operators import Check, each


def errors(_settings: object) -> Iterator[Exception]:
    try:
        publishers = options().publishers
    except (ImproperlyConfigured, TypeError) as error:
        yield error
        return
    for alias in publishers:
        try:
            make_publisher(alias)
        except ImproperlyConfigured as error:
            yield error


def lacks_default(_settings: object) -> bool:
    with suppress(ImproperlyConfigured, TypeError):
        return DEFAULT not in options().publishers
    return False


CHECKS = (
    Check(
        "E001",
        each("settings", errors),
        "{found}",
        "Correct OUTBOX, or install the extra that a publisher needs.",
    ),
    Check(
        "W002",
        each("settings", lacks_default),
        f"OUTBOX has no publisher called {DEFAULT!r}: events whose topic matches no"
        " route are kept and never sent.",
        "Add one to PUBLISHERS.",
    ),
)
