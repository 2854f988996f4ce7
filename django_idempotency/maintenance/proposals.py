"""Decisions that two operators have to make: the first proposes, the second decides the same.

A proposal is an entry in the record's history. It is valid for a day, as long as nothing happens to the record and the
operator who made it may still decide. A digest identifies what is proposed, so the entry contains nothing of a
response.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from django_idempotency.maintenance.log_entries import entries_of_life, is_kept, write_entry

VALID_FOR = timedelta(days=1)


def is_seconded(record: Any, user: Any, what: str, permission: str) -> bool:
    """Return whether a user other than ``user`` has proposed ``what`` for ``record``, and has ``permission``."""
    if not is_kept():
        return False
    entries = entries_of_life(record).filter(
        change_message__startswith=_beginning(what), action_time__gt=record.now - VALID_FOR
    )
    return any(entry.user.has_perm(permission) for entry in entries.exclude(user_id=user.pk).select_related("user"))


def propose(record: Any, user: Any, what: str, note: str) -> bool:
    """Write that ``user`` proposes ``what`` for ``record``. Return whether there is a log to write it to."""
    if not is_kept():
        return False
    write_entry(record, user, f"{_beginning(what)} {what}. {note}".strip())
    return True


def _beginning(what: str) -> str:
    """Return how an entry with this proposal, and no other entry, begins."""
    # The whole digest: with a shorter one, two responses could be made that have the same digest.
    return f"Proposed {hashlib.sha256(what.encode()).hexdigest()}:"
