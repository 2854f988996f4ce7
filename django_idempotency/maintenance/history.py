"""The history of records: what operators did, who, when and why.

Entries are in the admin's log, ``django_admin_log``, if ``django.contrib.admin`` is
installed, and in each log that an app registers. They are in English, because operators
with different languages read them. They name a record by its id, so that nothing of a
caller is left in them when the record is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import router, transaction
from django.db.models import Model, QuerySet

from django_idempotency.conf import conf
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.printable import is_blank
from django_idempotency.values.registry import Registry

VIEWED = "Response body viewed."


# --- Where it is kept -----------------------------------------------------------------


class Log(Protocol):
    """Where entries are kept. They have the attributes of Django's ``LogEntry``;
    ``user`` is shown as a text.
    """

    def entries(self, model: type[Model]) -> QuerySet[Any]:
        """Return all entries about the rows of ``model``."""

    def write(self, *, by: Any, model: type[Model], **columns: Any) -> object:
        """Write an entry about what ``by``, a user or a name, did.

        ``columns``: its ``object_id``, ``object_repr``, ``action_time`` and
        ``change_message``.
        """


class _AdminLog:
    """Its entries are deleted together with the account of their user."""

    def entries(self, model: type[Model]) -> QuerySet[Any]:
        from django.contrib.admin.models import LogEntry

        return LogEntry.objects.filter(
            content_type_id=self._kind(model)
        ).select_related("user")

    def write(self, *, by: Any, model: type[Model], **columns: Any) -> object:
        from django.contrib.admin.models import CHANGE, LogEntry

        if getattr(by, "pk", None) is None:
            return None
        return LogEntry.objects.create(
            user_id=by.pk,
            content_type_id=self._kind(model),
            action_flag=CHANGE,
            **columns,
        )

    def _kind(self, model: type[Model]) -> Any:
        from django.contrib.contenttypes.models import ContentType

        return ContentType.objects.get_for_model(model).pk


# to which each entry is written, too, and from which the history is read
logs_of_wings: Registry[Log] = Registry()


def logs() -> list[Log]:
    """Return where the history is kept; it is read from the last."""
    return [
        *([_AdminLog()] if apps.is_installed("django.contrib.admin") else []),
        *logs_of_wings,
    ]


def is_kept() -> bool:
    """Return whether there is a history."""
    return bool(logs())


def write_entry(record: Any, by: Any, message: str) -> None:
    """Write what ``by`` did with ``record``, which was read with ``now``: the time of
    the entry.

    Write nothing if ``by`` is ``None``. Wings have entries about rows of their own
    models.
    """
    model, id = type(record), str(record.pk)
    name = id if model is IdempotencyRecord else str(record)[:200]
    for log in logs() if by is not None else ():
        log.write(
            by=by,
            model=model,
            object_id=id,
            object_repr=name,
            action_time=record.now,
            change_message=message,
        )


@contextmanager
def transactions() -> Iterator[None]:
    """Undo entries that are written in the block if it raises an error."""
    with ExitStack() as stack:
        for using in {
            router.db_for_write(log.entries(IdempotencyRecord).model) for log in logs()
        }:
            stack.enter_context(transaction.atomic(using=using))
        yield


def entries_of_life(record: Any) -> QuerySet[Any]:
    """Return the entries about the present life of ``record``, the oldest first.

    Entries about earlier operations with the same scope and key, which had expired or
    been released, are left out.
    """
    entries = (
        logs()[-1]
        .entries(type(record))
        .filter(object_id=str(record.pk), action_time__gte=record.created_at)
    )
    return entries.order_by("action_time", "pk")


def lacks_note(note: str) -> bool:
    """Return whether ``DECISIONS`` requires a note, and ``note`` says nothing."""
    return "note" in conf().decisions and is_blank(note)


# --- Decisions of two operators -------------------------------------------------------

VALID_FOR = timedelta(days=1)


def is_seconded(record: Any, user: Any, what: str, permission: str) -> bool:
    """Return whether a user other than ``user`` has proposed ``what`` for ``record``,
    and has ``permission``.

    A proposal is an entry. It is valid for a day, as long as nothing happens to the
    record and the operator who made it may still decide. A digest identifies what is
    proposed, so the entry contains nothing of a response.
    """
    recent = entries_of_life(record).filter(action_time__gt=record.now - VALID_FOR)
    proposals = recent.filter(change_message__startswith=_beginning(what)).exclude(
        user_id=user.pk
    )
    others = get_user_model()._base_manager.filter(
        pk__in=list(proposals.values_list("user_id", flat=True))
    )
    return any(other.has_perm(permission) for other in others)


def propose(record: Any, user: Any, what: str, note: str) -> None:
    """Write that ``user`` proposes ``what`` for ``record``."""
    write_entry(record, user, f"{_beginning(what)} {what}. {note}".strip())


def _beginning(what: str) -> str:
    """Return how an entry with this proposal, and no other entry, begins."""
    # The whole digest: with a shorter one, two responses could be made that have the
    # same digest.
    return f"Proposed {hashlib.sha256(what.encode()).hexdigest()}:"


# --- Erasing its texts ----------------------------------------------------------------

ERASED = "(erased)"


def redact(ids: Collection[UUID]) -> None:
    """Replace the texts of the entries about the records ``ids``. Who did something,
    and when, remains.
    """
    for log in logs():
        log.entries(IdempotencyRecord).filter(
            object_id__in=[str(id) for id in ids]
        ).update(change_message=ERASED)
