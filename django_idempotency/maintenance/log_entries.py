"""The entries about records in the admin's log, ``django_admin_log``, if ``django.contrib.admin`` is installed.

They are stored in English, because operators with different languages read them, and shown in the active language.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.apps import apps
from django.db.models import QuerySet
from django.utils.translation import gettext, gettext_noop

from django_idempotency.keys import id_range, record_id
from django_idempotency.log_ids import ids_behind
from django_idempotency.maintenance.records import records
from django_idempotency.maintenance.selection import Selection
from django_idempotency.models import IdempotencyRecord
from django_idempotency.printable import printable
from django_idempotency.stores.connections import databases

if TYPE_CHECKING:
    from django.contrib.admin.models import LogEntry


RETRY_ALLOWED = gettext_noop("Retry allowed.")
FAILED = gettext_noop("Marked as failed with the response %(status)s.")
RESOLVED = gettext_noop("Resolved with the response %(status)s.")
EXTENDED = gettext_noop("Lease extended to %(seconds)s s from then.")
DIGEST = gettext_noop("Digest %(digest)s.")
VIEWED = gettext_noop("Response body viewed.")


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"%\\\((\w+)\\\)s", r"(?P<\1>\\S+)", re.escape(sentence)) + r"(?!\S)\s*")


_SENTENCES = {sentence: _pattern(sentence) for sentence in (RETRY_ALLOWED, FAILED, RESOLVED, EXTENDED, DIGEST, VIEWED)}


def told_entry(message: str) -> str:
    """Return the text of an entry in the active language. Text that is not the package's own, such as a note, stays."""
    for sentence, pattern in _SENTENCES.items():
        if found := pattern.match(message):
            told = gettext(sentence) % found.groupdict()
            return " ".join(filter(None, (told, told_entry(message[found.end() :]))))
    return message


def write_entry(record: Any, user: Any, message: str) -> LogEntry:
    """Write to the log what ``user`` did with ``record``, which was read with ``now``. The entry's time is ``now``."""
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    return LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(IdempotencyRecord).pk,
        object_id=str(record.pk),
        object_repr=str(record)[:200],
        action_flag=CHANGE,
        change_message=message,
        action_time=record.now,
    )


def entries_of_life(record: IdempotencyRecord) -> QuerySet[LogEntry]:
    """Return the entries about the present life of ``record``, the oldest first.

    Entries about earlier operations with the same scope and key, which had expired or been released, are left out.
    """
    return _entries().filter(object_id=str(record.pk), action_time__gte=record.created_at).order_by("action_time", "pk")


def _entries() -> QuerySet[LogEntry]:
    from django.contrib.admin.models import LogEntry
    from django.contrib.contenttypes.models import ContentType

    return LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(IdempotencyRecord))


# --- Erasing their texts ---------------------------------------------------------------------------------------------

ERASED = "(erased)"
LONGEST = 200  # characters of a name; longer names were cut
AT_ONCE = 500
OF_KEY = 18  # characters of an id that are the same for a key in every scope


def redact(ids: Collection[UUID]) -> None:
    """Replace the names and texts of the entries about the records ``ids``. Who did something, and when, remains."""
    if ids and is_kept():
        _redact(_entries().filter(object_id__in=[str(id) for id in ids]))


def redact_gone(selection: Selection) -> None:
    """``redact`` the entries about records that ``selection`` would match, but that are in no database any more.

    Such records are known only by their names, so a selection with a path matches none.
    """
    if selection.path is not None or not is_kept():
        return
    meant = [(pk, id) for pk, id, name in _candidates(selection) if id and _is_meant(UUID(id), name, selection)]
    for some in (meant[first : first + AT_ONCE] for first in range(0, len(meant), AT_ONCE)):
        ids = {id for _pk, id in some}
        left = {str(id) for using in databases() for id in _existing(ids, using)}
        _redact(_entries().filter(pk__in=[pk for pk, id in some if id not in left]))


def is_kept() -> bool:
    """Return whether the project has an admin log."""
    return apps.is_installed("django.contrib.admin")


def _redact(entries: QuerySet[LogEntry]) -> None:
    entries.update(object_repr=ERASED, change_message=ERASED)


def _candidates(selection: Selection) -> QuerySet[LogEntry, tuple[int, str | None, str]]:
    entries = _entries().exclude(object_repr=ERASED)
    if selection.record is not None:
        entries = entries.filter(object_id__in=[str(id) for id in ids_behind(selection.record)])
    if selection.key is not None:
        first, _last = id_range(selection.key)
        entries = entries.filter(object_id__startswith=str(first)[:OF_KEY])
    if (begins := selection.scope or selection.scope_prefix) is not None:
        entries = entries.filter(object_repr__startswith=printable(begins)[:LONGEST])
    return entries.values_list("pk", "object_id", "object_repr")


def _is_meant(id: UUID, name: str, selection: Selection) -> bool:
    """Whether an entry is meant, by its name: scope and key as ``printable`` shows them. If unclear, it is meant."""
    if not name.startswith(printable(selection.scope_prefix or "")[:LONGEST]):
        return False
    if selection.scope is None:
        return True
    begins = printable(f"{selection.scope} ")[:LONGEST]
    key = name.removeprefix(begins)
    cannot_be_told = len(name) == LONGEST or "\\" in key
    return name.startswith(begins) and (cannot_be_told or record_id(selection.scope, key) == id)


def _existing(ids: Collection[str], using: str) -> QuerySet[Any, UUID]:
    return records(using).filter(pk__in=ids).values_list("pk", flat=True)
