"""Select records to erase or export: those of a caller, a tenant, a key or a path."""

from __future__ import annotations

from dataclasses import dataclass, fields
from uuid import UUID

from django.db.models import Value
from django.db.models.functions import Substr

from django_idempotency.maintenance.records import Records
from django_idempotency.values.keys import is_record_id
from django_idempotency.values.outcomes import Snapshot


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that match everything that is set.

    - ``scope``: a whole scope, as it is stored.
    - ``scope_prefix``: the beginning of a scope, up to a separator, such as ``acme/`` for a tenant.
    - ``key``: a whole key, as the client sent it, in any scope.
    - ``record``: the id of a record.
    - ``path``: a whole path, as it is stored.

    Raises ``ValueError`` if nothing is set, if a text is empty, or if the prefix ends with a letter or a digit:
    ``acct:1`` would match ``acct:10``.
    """

    scope: str | None = None
    scope_prefix: str | None = None
    key: str | None = None
    record: UUID | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        stated = [value for field in fields(self) if (value := getattr(self, field.name)) is not None]
        if not stated or "" in stated:
            raise ValueError("Pass scope, scope_prefix, key, record or path to select records; none may be empty.")
        if self.scope_prefix is not None and self.scope_prefix[-1].isalnum():
            raise ValueError(
                f"scope_prefix is {self.scope_prefix!r}, which may also begin other scopes, such as "
                f"{self.scope_prefix + '0'!r}. End it with a separator, such as '/', or pass the whole scope."
            )

    def matches(self, record: Snapshot) -> bool:
        """Return whether a record of a store outside the database is selected. Such a store keeps no paths."""
        return (
            self.path is None
            and self.scope in (None, record.scope)
            and record.scope.startswith(self.scope_prefix or "")
            and self.key in (None, record.key)
            and self.record in (None, record.id)
        )

    def near(self, rows: Records) -> Records:
        """Narrow ``rows`` by their primary key, as far as the selection determines it."""
        if self.key is not None:
            rows = rows.with_key(self.key)
        if self.record is None:
            return rows
        return rows.filter(pk=self.record) if is_record_id(self.record) else rows.none()

    def of(self, rows: Records) -> Records:
        """Return those of ``rows`` that are selected. ``near`` must have narrowed them."""
        exact = {"scope": self.scope, "path": self.path}
        rows = rows.filter(**{name: value for name, value in exact.items() if value is not None})
        if self.scope_prefix is None:
            return rows
        # Not LIKE, which ignores case on SQLite.
        begins = Substr("scope", 1, len(self.scope_prefix))
        return rows.alias(begins=begins).filter(begins=Value(self.scope_prefix))
