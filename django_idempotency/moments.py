"""Times for people: in the time zone in force, and with its name. No other text tells what an hour means."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format


def in_zone(moment: datetime) -> datetime:
    """Return ``moment`` in the time zone in force. Without a zone (``USE_TZ = False``), it is in the default one."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.get_default_timezone())
    return timezone.localtime(aware)


def shown(moment: datetime) -> str:
    """Return date, time and zone as the language in force writes them: ``Nov. 23, 2026, 3:37 p.m. CET``."""
    return f"{date_format(in_zone(moment), 'DATETIME_FORMAT')} {zone(moment)}"


def zone(moment: datetime) -> str:
    """Return what the time zone in force is called at ``moment``: ``CET``, or ``+0545`` where it has no name.

    Django's ``T`` says nothing in the hour that comes twice, where it matters.
    """
    return in_zone(moment).tzname() or ""


def column(name: str, description: Any) -> Callable[[Any, Any], str | None]:
    """Return a column of the admin that shows the time ``name`` of a record with its zone, and orders by it."""
    from django.contrib import admin

    @admin.display(description=description, ordering=name)
    def show(_model_admin: Any, record: Any) -> str | None:
        moment: datetime | None = getattr(record, name)
        return None if moment is None else shown(moment)

    return show
