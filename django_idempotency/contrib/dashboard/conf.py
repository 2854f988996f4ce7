"""The ``DASHBOARD`` entry of the ``IDEMPOTENCY`` setting."""

from __future__ import annotations

from dataclasses import dataclass

from django_idempotency.extending import (
    Options,
    conf,
    option,
    options_of_app,
    or_none,
    seconds,
)


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(Options):
    """The options of the dashboard.

    ``observe``: seconds; only watch requests: nothing is refused or replayed, and
        likely duplicates within this time are counted. ``None``: requests are
        protected. ``stats_retention``: seconds to keep counters; ``None`` turns
        counting off.
    """

    observe: float | None = option(None, or_none(seconds(10)))
    stats_retention: float | None = option(8 * 24 * 60 * 60, or_none(seconds(1)))


def options() -> DashboardOptions:
    """Return the options in force. Raises ``ImproperlyConfigured``."""
    found: DashboardOptions = options_of_app("DASHBOARD", DashboardOptions)
    return found


def observes() -> bool:
    """Whether entry points only watch requests."""
    return conf().enabled and options().observe is not None
