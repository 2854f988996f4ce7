"""The history of records: what operators did, who, when and why.

Entries are in the admin's log, ``django_admin_log``, if ``django.contrib.admin`` is installed, and in each log that an
app registers. They are stored in English, because operators with different languages read them, and shown in the
active language.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import UUID

from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import router, transaction
from django.db.models import Model, QuerySet
from django.utils.translation import gettext, gettext_noop

from django_idempotency.conf import conf
from django_idempotency.maintenance.records import records, stores_outside
from django_idempotency.maintenance.selection import Selection
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.connections import databases
from django_idempotency.values.keys import id_range, record_id
from django_idempotency.values.printable import is_blank, printable

RETRY_ALLOWED = gettext_noop("Retry allowed.")
FAILED = gettext_noop("Marked as failed with the response %(status)s.")
RESOLVED = gettext_noop("Resolved with the response %(status)s.")
EXTENDED = gettext_noop("Lease extended to %(seconds)s s from then.")
DIGEST = gettext_noop("Digest %(digest)s.")
VIEWED = gettext_noop("Response body viewed.")
ERASED_ON_HOLD = gettext_noop("Erased while on hold.")


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"%\\\((\w+)\\\)s", r"(?P<\1>\\S+)", re.escape(sentence)) + r"(?!\S)\s*")


_SENTENCES = {
    sentence: _pattern(sentence)
    for sentence in (RETRY_ALLOWED, FAILED, RESOLVED, EXTENDED, DIGEST, VIEWED, ERASED_ON_HOLD)
}


def shown_entry(message: str) -> str:
    """Return the text of an entry in the active language. Text that is not the package's own, such as a note, stays."""
    for sentence, pattern in _SENTENCES.items():
        if found := pattern.match(message):
            translated = gettext(sentence) % found.groupdict()
            return " ".join(filter(None, (translated, shown_entry(message[found.end() :]))))
    return message


# --- Where it is kept ------------------------------------------------------------------------------------------------


class Log(Protocol):
    """Where entries are kept. They have the attributes of Django's ``LogEntry``; ``user`` is shown as a text."""

    def entries(self, model: type[Model]) -> QuerySet[Any]:
        """Return all entries about the rows of ``model``."""

    def write(
        self,
        *,
        by: Any,
        model: type[Model],
        object_id: str,
        object_repr: str,
        action_time: datetime,
        change_message: str,
    ) -> object:
        """Write an entry about what ``by``, a user or a name, did."""


class _AdminLog:
    """Its entries are deleted together with the account of their user."""

    def entries(self, model: type[Model]) -> QuerySet[Any]:
        from django.contrib.admin.models import LogEntry

        return LogEntry.objects.filter(content_type_id=self._kind(model)).select_related("user")

    def write(self, *, by: Any, model: type[Model], **columns: Any) -> object:
        from django.contrib.admin.models import CHANGE, LogEntry

        if getattr(by, "pk", None) is None:
            return None
        return LogEntry.objects.create(user_id=by.pk, content_type_id=self._kind(model), action_flag=CHANGE, **columns)

    def _kind(self, model: type[Model]) -> Any:
        from django.contrib.contenttypes.models import ContentType

        return ContentType.objects.get_for_model(model).pk


_logs: list[Log] = []


def register(log: Log) -> None:
    """Write each entry to ``log``, too, and read the history from there. Call this in the ``ready()`` of an app."""
    if log not in _logs:  # an AppConfig can get ready again
        _logs.append(log)


def logs() -> list[Log]:
    """Return where the history is kept; it is read from the last."""
    return [*([_AdminLog()] if apps.is_installed("django.contrib.admin") else []), *_logs]


def is_kept() -> bool:
    """Return whether there is a history."""
    return bool(logs())


def write_entry(record: Any, by: Any, message: str) -> None:
    """Write what ``by`` did with ``record``, which was read with ``now``: the time of the entry.

    Write nothing if ``by`` is ``None``. Wings have entries about rows of their own models.
    """
    _write(record.pk, str(record)[:LONGEST], record.now, by, message, _model_of(record))


def _write(id: Any, name: str, at: datetime, by: Any, message: str, model: type[Model] = IdempotencyRecord) -> None:
    for log in logs() if by is not None else ():
        log.write(by=by, model=model, object_id=str(id), object_repr=name, action_time=at, change_message=message)


def _model_of(record: Any) -> type[Model]:
    return type(record) if isinstance(record, Model) else IdempotencyRecord  # one in another store


@contextmanager
def transactions() -> Iterator[None]:
    """Undo entries that are written in the block if it raises an error."""
    with ExitStack() as stack:
        for using in {router.db_for_write(log.entries(IdempotencyRecord).model) for log in logs()}:
            stack.enter_context(transaction.atomic(using=using))
        yield


def entries_of_life(record: Any) -> QuerySet[Any]:
    """Return the entries about the present life of ``record``, the oldest first.

    Entries about earlier operations with the same scope and key, which had expired or been released, are left out.
    """
    entries = logs()[-1].entries(_model_of(record)).filter(object_id=str(record.pk), action_time__gte=record.created_at)
    return entries.order_by("action_time", "pk")


def lacks_note(note: str) -> bool:
    """Return whether ``DECISIONS`` requires a note, and ``note`` says nothing."""
    return "note" in conf().decisions and is_blank(note)


# --- Decisions of two operators --------------------------------------------------------------------------------------

VALID_FOR = timedelta(days=1)


def is_seconded(record: Any, user: Any, what: str, permission: str) -> bool:
    """Return whether a user other than ``user`` has proposed ``what`` for ``record``, and has ``permission``.

    A proposal is an entry. It is valid for a day, as long as nothing happens to the record and the operator who made it
    may still decide. A digest identifies what is proposed, so the entry contains nothing of a response.
    """
    recent = entries_of_life(record).filter(action_time__gt=record.now - VALID_FOR)
    proposals = recent.filter(change_message__startswith=_beginning(what)).exclude(user_id=user.pk)
    others = get_user_model()._base_manager.filter(pk__in=list(proposals.values_list("user_id", flat=True)))
    return any(other.has_perm(permission) for other in others)


def propose(record: Any, user: Any, what: str, note: str) -> None:
    """Write that ``user`` proposes ``what`` for ``record``."""
    write_entry(record, user, f"{_beginning(what)} {what}. {note}".strip())


def _beginning(what: str) -> str:
    """Return how an entry with this proposal, and no other entry, begins."""
    # The whole digest: with a shorter one, two responses could be made that have the same digest.
    return f"Proposed {hashlib.sha256(what.encode()).hexdigest()}:"


# --- Erasing its texts -----------------------------------------------------------------------------------------------

ERASED = "(erased)"
LONGEST = 200  # characters of a name; longer names were cut
AT_ONCE = 500
OF_KEY = 18  # characters of an id that are the same for a key in every scope


def redact(ids: Collection[UUID]) -> None:
    """Replace the names and texts of the entries about the records ``ids``. Who did something, and when, remains."""
    if ids:
        for log in logs():
            _redact(log.entries(IdempotencyRecord).filter(object_id__in=[str(id) for id in ids]))


def write_erasure(id: UUID, at: datetime, by: Any, note: str) -> None:
    """Write that ``by`` has erased the record ``id``, which was on hold."""
    _write(id, ERASED, at, by, f"{ERASED_ON_HOLD} {note}".strip())


def redact_gone(selection: Selection) -> None:
    """``redact`` the entries about records that ``selection`` would match, but that are in no database any more.

    Such records are known only by their names, so a selection with a path matches none.
    """
    if selection.path is not None:
        return
    for log in logs():
        candidates = _candidates(log.entries(IdempotencyRecord), selection)
        meant = [(pk, id) for pk, id, name in candidates if id and _is_meant(UUID(id), name, selection)]
        for some in (meant[first : first + AT_ONCE] for first in range(0, len(meant), AT_ONCE)):
            left = _existing({id for _pk, id in some})
            _redact(log.entries(IdempotencyRecord).filter(pk__in=[pk for pk, id in some if id not in left]))


def _redact(entries: QuerySet[Any]) -> None:
    entries.update(object_repr=ERASED, change_message=ERASED)


def _candidates(entries: QuerySet[Any], selection: Selection) -> QuerySet[Any, tuple[Any, str | None, str]]:
    entries = entries.exclude(object_repr=ERASED)
    if selection.record is not None:
        entries = entries.filter(object_id=str(selection.record))
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
    is_unclear = len(name) == LONGEST or "\\" in key
    return name.startswith(begins) and (is_unclear or record_id(selection.scope, key) == id)


def _existing(ids: Collection[str]) -> set[str]:
    found = {str(id) for using in databases() for id in records(using).filter(pk__in=ids).values_list("pk", flat=True)}
    return found | {id for store in stores_outside() for id in ids if store.read(UUID(id))}
