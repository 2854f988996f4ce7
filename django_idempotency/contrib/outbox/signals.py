"""Signals about events of the outbox, sent once for each batch when the fact is noted;
receivers' errors are logged.
"""

from __future__ import annotations

import logging

from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _

from django_idempotency.extending import Event, Family

# count: how many events their publisher confirmed; using: the alias of their database
outbox_published = Signal()
# count, using; the publisher refused them, and they will be tried again
outbox_failed = Signal()
# count, using; they are not tried again unless an operator requeues them
outbox_dead_lettered = Signal()
outbox_requeued = Signal()  # count, using; an operator requeued these dead letters

FAMILY = Family(
    "outbox",
    "publisher",
    (
        Event(
            "outbox_published",
            outbox_published,
            "An event of the outbox was published: its publisher confirmed it.",
        ),
        Event(
            "outbox_failed",
            outbox_failed,
            "An event of the outbox was refused; it is tried again.",
        ),
        Event(
            "outbox_dead_lettered",
            outbox_dead_lettered,
            "An event of the outbox was given up: it is a dead letter.",
            level=logging.ERROR,
        ),
        Event(
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
