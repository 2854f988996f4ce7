"""The strip above the dashboard and the lists: what an operator should look at now, or
that there is nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_idempotency.admin.pages import SECONDS, Asking, panel
from django_idempotency.maintenance import stats
from django_idempotency.maintenance.formatting import age, amount
from django_idempotency.maintenance.stats import alarms_of_store, outside_stores
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.connections import databases
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.registry import Registry

MOST = 10_000  # the most records of each kind that are counted


@dataclass(frozen=True, slots=True)
class Alarm:
    """``situation`` names the list that shows these records, if the admin has one."""

    text: str
    situation: str = ""


# functions of the alias ``using`` of a database
alarms_of_wings: Registry[Callable[..., list[Alarm]]] = Registry()


def alarms(using: str) -> list[Alarm] | None:
    """Return the alarms, an empty list if there are none; ``None`` if the database did
    not respond in time.

    The first database has those of the stores outside.
    """
    found = panel(_in_database, using)
    if found is None or using != databases()[0]:
        return found
    return found + [alarm for alias in outside_stores() for alarm in _of_store(alias)]


def _in_database(ask: Asking) -> list[Alarm]:
    of_records = alarms_shown(ask(stats.alarms, most=MOST))
    return of_records + [alarm for of_wing in alarms_of_wings for alarm in ask(of_wing)]


def _of_store(alias: str) -> list[Alarm]:
    named = {"store": alias}
    try:
        found = alarms_shown(alarms_of_store(alias, seconds=SECONDS))
    except StoreUnavailable as error:
        log(logging.WARNING, "admin", "idempotency admin: %s", cause(error))
        return [Alarm(_("store %(store)s: did not respond") % named)]
    return [
        Alarm(_("store %(store)s: %(alarm)s") % {**named, "alarm": alarm.text})
        for alarm in found
    ]


def alarms_shown(found: Mapping[str, float]) -> list[Alarm]:
    """Return the alarms that are raised, in words. Pure."""
    texts = {
        "stuck": _("%(count)s stuck, oldest %(age)s"),
        "on_hold": _("%(count)s on hold, oldest %(age)s"),
    }
    return [
        Alarm(
            text
            % {
                "count": amount(found[name], MOST),
                "age": age(found[f"{name}_oldest"]),
            },
            name,
        )
        for name, text in texts.items()
        if found[name]
    ]
