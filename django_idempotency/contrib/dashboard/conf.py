"""The ``DASHBOARD`` entry of the ``IDEMPOTENCY`` setting."""

from __future__ import annotations

from dataclasses import dataclass

from django_idempotency.conf import OBSERVE, options_of_wing
from django_idempotency.values.rules import (
    Kept,
    Seconds,
    option,
    or_none,
    seconds,
    validate,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the dashboard.

    ``observe``: seconds; only watch requests: nothing is refused or replayed, and likely duplicates within this time
        are counted. ``None``: requests are protected.
    ``stats_retention``: seconds to keep counters; ``None`` turns counting off.
    """

    observe: Kept[Seconds | None, float | None] = option(None, OBSERVE)
    stats_retention: Kept[Seconds | None, float | None] = option(
        8 * 24 * 60 * 60, or_none(seconds(1))
    )

    def __post_init__(self) -> None:
        validate(self)


def options() -> Options:
    """Return the options in force. Raises ``ImproperlyConfigured``."""
    found: Options = options_of_wing("DASHBOARD", Options)
    return found
