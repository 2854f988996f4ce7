"""The table of passes that task queues run. Apps register their own passes in it.

A pass takes options and returns figures, both as plain values. Settings may import this
module before models are loaded, so the table has the paths of functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.values.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass of maintenance, and its schedule.

    - ``name``: unique among the passes of all apps.
    - ``path``: dotted path of the function, which takes ``using`` and returns a
      dataclass.
    - ``every``: seconds between two runs.
    - ``bounded``: whether it takes ``max_seconds``, which ends a run before the limit
      has to.
    - ``on_stores``: whether it takes ``store`` instead of ``using``, and also works on
      the stores outside the databases.

    A message lives for a third of ``every``, and a run for 0.6 of it. So no run
    overlaps with the next one, without a lock.
    """

    name: str
    path: str
    every: float
    bounded: bool = True
    on_stores: bool = False

    @property
    def expires(self) -> float:
        return self.every / 3

    @property
    def time_limit(self) -> float:
        return self.every * 0.6

    @property
    def max_seconds(self) -> float | None:
        return self.every / 2 if self.bounded else None


REAP = Pass(
    name="reap",
    path="django_idempotency.maintenance.reaper.reap",
    every=60.0,
    on_stores=True,
)
CLEANUP = Pass(
    name="cleanup", path="django_idempotency.maintenance.cleaner.cleanup", every=600.0
)
DROP_BODIES = replace(
    CLEANUP,
    name="drop_bodies",
    path="django_idempotency.maintenance.cleaner.drop_bodies",
)

PASSES = Registry(REAP, CLEANUP, DROP_BODIES)


def run_pass(name: str, **options: Any) -> dict[str, Any]:
    """Run the pass ``name`` on each database with records, unless ``using`` names one,
    and on each store outside if it can; return its figures.

    If it works in several places, return the figures of each by its alias. If one
    fails, the others are worked on all the same, and the error is raised at the end.
    Raises ``KeyError`` if there is no such pass.
    """
    found = {one.name: one for one in PASSES}[name]
    run = import_string(found.path)
    from django_idempotency.maintenance import stats
    from django_idempotency.stores.connections import databases

    using = options.pop("using", None)
    wanted: dict[str, dict[str, Any]] = {
        alias: {"using": alias}
        for alias in (databases() if using is None else (using,))
    }
    if found.on_stores and using is None:
        wanted |= {
            stats.labelled(alias): {"store": stats.outside_store(alias)}
            for alias in stats.outside_stores()
        }
    if len(wanted) == 1:
        (where,) = wanted.values()
        return asdict(run(**where, **options))
    return _run_on_each(run, wanted, options)


def _run_on_each(
    run: Callable[..., Any], wanted: dict[str, dict[str, Any]], options: dict[str, Any]
) -> dict[str, Any]:
    if options.get("max_seconds") is not None:
        options["max_seconds"] /= len(wanted)
    figures: dict[str, Any] = {}
    errors: list[Exception] = []
    for alias, where in wanted.items():
        try:
            figures[alias] = asdict(run(**where, **options))
        except Exception as error:
            error.add_note(f"in {alias!r}")
            errors.append(error)
    if errors:
        raise ExceptionGroup("maintenance failed in some places", errors)
    return figures
