"""Signals about steps; receivers' errors are logged."""

from __future__ import annotations

import logging

from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _

from django_idempotency.extending import Event, Family

# operation, step: its name, attempt, seconds, count: 1, using: the database; the sender
# is the part of the name before a colon
step_completed = Signal()
# operation, step, attempt, reason, count, using; an operator has to decide
step_held = Signal()

FAMILY = Family(
    "steps",
    "step",
    (
        Event("step_completed", step_completed, "A step of an operation was done."),
        Event(
            "step_held",
            step_held,
            "A step put its key on hold: an operator has to decide.",
            level=logging.WARNING,
        ),
    ),
    {"step_completed": _("steps done"), "step_held": _("steps on hold")},
)
