"""Signals about events of the outbox. The relay sends them once the fact is noted; receivers' errors are logged.

``event_published`` and its like are sent for each event, ``outbox_published`` and its like once for each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _

from django_idempotency.messages.publisher import Event, Refused
from django_idempotency.reporting.events import Event as ReportedEvent
from django_idempotency.reporting.events import Family, send_several
from django_idempotency.reporting.logs import log

outbox_published = Signal()  # count: how many events their publisher confirmed; using: the alias of their database
outbox_failed = Signal()  # count, using; the publisher refused them, and they will be tried again
outbox_dead_lettered = Signal()  # count, using; they are not tried again unless an operator requeues them
outbox_requeued = Signal()  # count, using; an operator requeued these dead letters

FAMILY = Family(
    "outbox",
    "publisher",
    (
        ReportedEvent(
            "outbox_published",
            outbox_published,
            "An event of the outbox was published: its publisher confirmed it.",
        ),
        ReportedEvent("outbox_failed", outbox_failed, "An event of the outbox was refused; it is tried again."),
        ReportedEvent(
            "outbox_dead_lettered",
            outbox_dead_lettered,
            "An event of the outbox was given up: it is a dead letter.",
            level=logging.ERROR,
        ),
        ReportedEvent(
            "outbox_requeued",
            outbox_requeued,
            "An operator had a dead letter of the outbox tried again.",
            level=logging.INFO,
        ),
    ),
    {
        "outbox_published": _("events published"),
        "outbox_failed": _("refusals, to be tried again"),
        "outbox_dead_lettered": _("dead letters"),
        "outbox_requeued": _("dead letters requeued"),
    },
)

event_published = Signal()  # event; its publisher confirmed it, and the outbox has noted that
event_failed = Signal()  # event, reason, attempts; it is tried again later
event_dead_lettered = Signal()  # event, reason, attempts; it is not tried again until it is requeued


def tell(
    publisher: str, confirmed: Sequence[Event], failed: Sequence[Refused], dead: Sequence[Refused], using: str
) -> None:
    """Send the signals of a batch. ``publisher``: its alias, the ``sender``. ``using``: the alias of the database."""
    send_several(outbox_published, publisher, len(confirmed), using)
    send_several(outbox_failed, publisher, len(failed), using)
    send_several(outbox_dead_lettered, publisher, len(dead), using)
    for event in confirmed if event_published.receivers else ():
        _send(event_published, publisher, event)
    for signal, refused in ((event_failed, failed), (event_dead_lettered, dead)):
        for refusal in refused:
            _send(signal, publisher, refusal.event, reason=refusal.reason, attempts=refusal.event.attempts + 1)


def _send(signal: Signal, publisher: str, event: Event, **named: Any) -> None:
    for receiver, answer in signal.send_robust(sender=publisher, event=event, **named):
        if isinstance(answer, Exception):
            log(logging.ERROR, "receiver", "error in a receiver of a signal: %r", receiver, error=answer)
