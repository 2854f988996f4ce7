"""How a record stands, and since when, as lists, pages and confirmations say it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connections
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_idempotency.maintenance.advice import shown_reason, standing_of
from django_idempotency.models import LIVE
from django_idempotency.policy import Mode
from django_idempotency.stats.formatting import age
from django_idempotency.values.printable import in_zone


def badge(record: Any) -> SafeString:
    stands = standing_of(record)
    text = ", ".join(str(part) for part in (stands.label, record.response_status) if part is not None)
    return format_html('<span class="idempotency-badge {}">{}</span>', stands.name.lower(), text)


def summary(record: Any) -> list[str]:
    """Return what an operator has to know before a decision: since when, after how many attempts, and why."""
    if record.status in LIVE:
        since = gettext("in flight for {age}").format(age=claim(record))
    else:
        text = gettext("on hold for {age}") if record.on_hold else gettext("ended {age} ago")
        since = text.format(age=_ago(record.now - record.updated_at))
    attempts = ngettext("%(count)d attempt", "%(count)d attempts", record.attempts) % {"count": record.attempts}
    return [text for text in (since, attempts, shown_reason(record)) if text]


def claim(record: Any) -> str | None:
    """Return how long a record has been in flight, and what is known of its owner."""
    if record.locked_at is None:
        return None
    if record.mode == Mode.LEASE:
        lapsed = record.locked_until < record.now
        text = gettext("{since}, lease ran out {left} ago") if lapsed else gettext("{since}, lease for {left} more")
    elif connections[record._state.db].vendor != "postgresql":  # RowLocked can't tell there
        text = gettext("{since}; locked_until is not renewed in atomic mode")
    elif record.locked:
        text = gettext("{since}, an owner has its row locked")
    else:
        text = gettext("{since}, its row is not locked")
    left = _ago(abs(record.locked_until - record.now))
    return text.format(since=_ago(record.now - record.locked_at), left=left)


def since(record: Any) -> SafeString:
    """Return how long a record has been as it is; the time itself on hover."""
    moment = record.locked_at or record.updated_at
    at = in_zone(moment).isoformat(timespec="seconds")
    named = {"column": _column(_("since")), "at": at, "ago": _ago(record.now - moment)}
    return format_html('{column} <time datetime="{at}" title="{at}">{ago}</time>', **named)


def attempts(record: Any) -> SafeString:
    return format_html("{} {}", _column(_("attempts")), record.attempts)


def _ago(span: timedelta) -> str:
    return age(span.total_seconds())


def _column(name: Any) -> SafeString:
    """Return the name of the column, for narrow windows, in which the list has no head."""
    return format_html('<span class="idempotency-column">{}</span>', name)
