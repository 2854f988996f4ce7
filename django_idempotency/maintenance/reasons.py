"""Why a record stands as it does, in words. Reasons are stored and logged in English, and translated for readers."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext

from django_idempotency.printable import printable


def told_reason(record: Any) -> str:
    """Return the reason of ``record``, printable and in the active language; empty if it has none."""
    return printable(gettext(record.reason))
