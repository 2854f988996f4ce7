"""What wings keep about records: it is deleted, erased, exported and encrypted anew
together with them, and an operator sees it, and decides about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from django.utils.functional import Promise

from django_idempotency.values.registry import Registry


class Companion:
    """What a wing keeps about records of the database ``using``. Register an
    instance.
    """

    def delete(self, ids: Collection[UUID], using: str) -> None:
        """Delete it, in the transaction in which the records ``ids`` are deleted."""

    def empty(self, ids: Collection[UUID], using: str) -> None:
        """Erase what callers wrote or got, in the transaction in which the records are
        emptied.
        """

    def unfinished(self, ids: Collection[UUID], using: str) -> Collection[UUID]:
        """Return those of the records ``ids`` that are done in part, which a retry of a
        deleted key would do again: an erasure keeps them as keys on hold.
        """
        return ()

    def decided(self, record: Any, act: str) -> None:
        """Note what an operator did with ``record``, in the transaction of that."""

    def events(self, record: Any) -> Iterable[tuple[datetime, str | Promise]]:
        """Return what has happened, for the record's timeline."""
        return ()

    def exported(self, record: Any, *, bodies: bool) -> dict[str, Any]:
        """Return more of the record's export; with ``bodies`` what needs the permission
        for those.
        """
        return {}

    def progress(self, record: Any) -> dict[str, Any]:
        """Return how far the operation is, as its caller may see it."""
        return {}

    def reencrypt(self, using: str) -> int:
        """Encrypt what has not the newest key yet; return how many were."""
        return 0


companions: Registry[Companion] = Registry()


def progress_of(record: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for companion in companions:
        shown |= companion.progress(record)
    return shown
