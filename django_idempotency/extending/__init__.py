"""What a wing needs of the core. Unstable until 1.0: a minor version may change it.

Everything here can be imported before models are loaded. What needs them is in the
modules of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django.utils.module_loading import import_string

from django_idempotency.conf import Conf, conf, of_project, options_of_app, resolve
from django_idempotency.maintenance.passes import Pass
from django_idempotency.reporting.events import Event, Family, families, send_several
from django_idempotency.reporting.logs import cause, is_due, log
from django_idempotency.values.printable import column, in_zone, printable
from django_idempotency.values.rules import (
    BACKENDS,
    FOR_GOOD,
    MAPPING,
    Options,
    nearest,
    number,
    one_of,
    option,
    or_none,
    seconds,
    text,
)

if TYPE_CHECKING:
    from django_idempotency.checks import Check

__all__ = [
    "BACKENDS",
    "FOR_GOOD",
    "MAPPING",
    "Conf",
    "Event",
    "Family",
    "Options",
    "Pass",
    "cause",
    "column",
    "conf",
    "families",
    "in_zone",
    "is_due",
    "log",
    "nearest",
    "number",
    "of_project",
    "one_of",
    "option",
    "options_of_app",
    "or_none",
    "printable",
    "register",
    "resolve",
    "seconds",
    "send_several",
    "text",
]


REGISTRIES = {
    "events": "reporting.events.families",
    "listeners": "reporting.events.receivers",
    "suspensions": "conf.suspensions",
    "gauges": "instrumentation.metrics.gauge_families",
    "passes": "maintenance.passes.PASSES",
    "prunes": "maintenance.cleaner.prunes",
    "companions": "maintenance.companions.companions",
    "decisions": "maintenance.decision_forms.INTERVENTIONS",
    "delays": "maintenance.stats.delays",
    "histories": "maintenance.history.logs_of_wings",
    "sections": "maintenance.formatting.sections",
    "shardings": "maintenance.records.shardings",
    "meanings": "stores.errors.meanings",
    "replays": "engine.claims.amendments",
    "verdicts": "engine.lease_runs.verdict_hooks",
    "alarms": "admin.alarms.alarms_of_wings",
    "pages": "admin.pages.registered",
}


def register(
    label: str, *, page: str = "", checks: Sequence[Check] = (), **parts: Iterable[Any]
) -> None:
    """Add what a wing has to what the core shows, counts and runs. Call this in the
    ``ready()`` of its app.

    ``label``: that of the app, which prefixes the ids of its ``checks``. ``page`` of
    the documentation has a heading for each id. ``parts``: see ``docs/extending.md``.
    """
    if checks:
        from django_idempotency.checks import register as register_checks

        register_checks(checks, label=label, page=page)
    for name, items in parts.items():
        import_string(f"django_idempotency.{REGISTRIES[name]}").register(*items)
