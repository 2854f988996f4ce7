"""What happened to an event of the outbox. Sent by the relay, once the fact stands; receivers' errors are logged.

For metrics there are ``outbox_published`` and others in ``django_idempotency.signals``, sent once for a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.logs import log
from django_idempotency.outbox.publishers.base import Event, Refused

event_published = Signal()  # event; its publisher confirmed it, and the outbox has noted that
event_failed = Signal()  # event, reason, attempts; it is tried again later
event_dead_lettered = Signal()  # event, reason, attempts; it is not tried again until it is requeued


def tell(
    publisher: str, confirmed: Sequence[Event], refused: Sequence[Refused], dead: Collection[Refused], using: str
) -> None:
    """Send the signals of a batch, with the alias of the publisher as ``sender``. ``using``: alias of its database."""
    signals.send_of_outbox(signals.outbox_published, publisher, len(confirmed), using)
    signals.send_of_outbox(signals.outbox_failed, publisher, len(refused) - len(dead), using)
    signals.send_of_outbox(signals.outbox_dead_lettered, publisher, len(dead), using)
    for event in confirmed if event_published.receivers else ():
        _send(event_published, publisher, event)
    given_up = {refusal.event.position for refusal in dead}
    for refusal in refused:
        signal = event_dead_lettered if refusal.event.position in given_up else event_failed
        _send(signal, publisher, refusal.event, reason=refusal.reason, attempts=refusal.event.attempts + 1)


def _send(signal: Signal, publisher: str, event: Event, **named: Any) -> None:
    for receiver, answer in signal.send_robust(sender=publisher, event=event, **named):
        if isinstance(answer, Exception):
            log(logging.ERROR, "receiver", "error in a receiver of a signal: %r", receiver, error=answer)
