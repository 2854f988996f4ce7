"""Text for people: what clients sent, made safe for terminals, log files and pages; and
times with their zone.

Escape sequences can make a terminal hide or rewrite what it shows; bidirectional and
invisible characters can make one text look like another (CVE-2021-42574,
https://trojansource.codes). Templates escape HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format


def printable(text: str) -> str:
    """Return ``text`` with every character that is neither visible nor a plain space as
    an escape like ``\\x1b``.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, but keep line feeds and tabs."""
    return "".join(
        character if character in "\n\t" else _printable(character)
        for character in text
    )


def is_blank(text: str) -> bool:
    """Return whether ``text`` has neither a letter nor a digit. Invisible characters
    are not white space.
    """
    return not any(map(str.isalnum, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


# --- Times, in the time zone in force and with its name: nothing else says which zone
# it is ---


def in_zone(moment: datetime) -> datetime:
    """Return ``moment`` in the time zone in force. If it is naive (``USE_TZ = False``),
    it is in the default zone.
    """
    aware = (
        moment
        if moment.tzinfo
        else moment.replace(tzinfo=timezone.get_default_timezone())
    )
    return timezone.localtime(aware)


def shown(moment: datetime) -> str:
    """Return date, time and zone as the language in force writes them: ``Nov. 23, 2026,
    3:37 p.m. CET``.
    """
    return f"{date_format(in_zone(moment), 'DATETIME_FORMAT')} {zone(moment)}"


def zone(moment: datetime) -> str:
    """Return the name of the time zone in force at ``moment``: ``CET``, or ``+0545`` if
    it has no name.

    Django's format ``T`` is empty in the hour that occurs twice, which is when the zone
    matters.
    """
    return in_zone(moment).tzname() or ""


def column(name: str, description: Any) -> Callable[[Any, Any], str | None]:
    """Return a column of the admin that shows the time ``name`` of a record with its
    zone, and orders by it.
    """
    from django.contrib import admin

    @admin.display(description=description, ordering=name)
    def show(_model_admin: Any, record: Any) -> str | None:
        moment: datetime | None = getattr(record, name)
        return None if moment is None else shown(moment)

    return show
