"""Decisions that two operators have to make: the first proposes, the second decides the same.

A proposal is an entry in the record's history. It stands for a day, while nothing happens to the record, and while the
one who made it may decide. What is proposed is known by a digest, so nothing of a response is in it.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from django_idempotency.maintenance.log_entries import entries_of_life, is_kept, write_entry

VALID_FOR = timedelta(days=1)


def is_seconded(record: Any, user: Any, what: str, permission: str) -> bool:
    """Return whether somebody else than ``user``, who has ``permission``, has proposed ``what`` for ``record``."""
    if not is_kept():
        return False
    entries = entries_of_life(record).filter(
        change_message__startswith=_beginning(what), action_time__gt=record.now - VALID_FOR
    )
    return any(entry.user.has_perm(permission) for entry in entries.exclude(user_id=user.pk).select_related("user"))


def propose(record: Any, user: Any, what: str, note: str) -> bool:
    """Write that ``user`` proposes ``what`` for ``record``; return whether there is a log to write it to."""
    if not is_kept():
        return False
    write_entry(record, user, f"{_beginning(what)} {what}. {note}".strip())
    return True


def _beginning(what: str) -> str:
    """What only an entry with this proposal begins with."""
    # All of the digest: of a shorter one somebody could make two responses that have the same.
    return f"Proposed {hashlib.sha256(what.encode()).hexdigest()}:"
