"""Signals about events of the outbox. The relay sends them once the fact is noted; receivers' errors are logged.

For metrics, use ``outbox_published`` and others in ``django_idempotency.signals``, which are sent once for each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.logs import log
from django_idempotency.outbox.publishers.base import Event, Refused

event_published = Signal()  # event; its publisher confirmed it, and the outbox has noted that
event_failed = Signal()  # event, reason, attempts; it is tried again later
event_dead_lettered = Signal()  # event, reason, attempts; it is not tried again until it is requeued


def tell(
    publisher: str, confirmed: Sequence[Event], failed: Sequence[Refused], dead: Sequence[Refused], using: str
) -> None:
    """Send the signals of a batch. ``publisher``: its alias, the ``sender``. ``using``: the alias of the database."""
    signals.send_of_outbox(signals.outbox_published, publisher, len(confirmed), using)
    signals.send_of_outbox(signals.outbox_failed, publisher, len(failed), using)
    signals.send_of_outbox(signals.outbox_dead_lettered, publisher, len(dead), using)
    for event in confirmed if event_published.receivers else ():
        _send(event_published, publisher, event)
    for signal, refused in ((event_failed, failed), (event_dead_lettered, dead)):
        for refusal in refused:
            _send(signal, publisher, refusal.event, reason=refusal.reason, attempts=refusal.event.attempts + 1)


def _send(signal: Signal, publisher: str, event: Event, **named: Any) -> None:
    for receiver, answer in signal.send_robust(sender=publisher, event=event, **named):
        if isinstance(answer, Exception):
            log(logging.ERROR, "receiver", "error in a receiver of a signal: %r", receiver, error=answer)
