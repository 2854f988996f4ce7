"""The entries, which refer to no other table."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _


class Entries(models.Manager["Entry"]):
    def entries(self, model: type[models.Model]) -> models.QuerySet[Entry]:
        """Return all entries about the rows of ``model``."""
        return self.filter(model=model._meta.label)

    def write(self, *, by: Any, model: type[models.Model], **columns: Any) -> Entry:
        """Add an entry about what ``by``, a user or a name, did."""
        who = {"user_id": getattr(by, "pk", None) or "", "user": str(by)[:254]}
        return self.create(model=model._meta.label, **who, **columns)


class Entry(models.Model):
    """What an operator did with a record, or with a row of a wing.

    ``user`` is their name then; ``user_id`` is empty if they had no account.
    """

    action_time = models.DateTimeField(_("when"))
    user = models.CharField(_("who"), max_length=254)
    user_id = models.CharField(_("id of the user"), max_length=64)
    model = models.CharField(_("kind"), max_length=100)
    object_id = models.CharField(_("id"), max_length=36, db_index=True)
    object_repr = models.CharField(_("name"), max_length=200)
    change_message = models.TextField(_("what"))

    objects: ClassVar[Entries] = Entries()

    class Meta:
        verbose_name = _("audit entry")
        verbose_name_plural = _("audit entries")
        db_table = "django_idempotency_audit"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return (
            f"{self.action_time.isoformat(' ', 'seconds')} {self.user}:"
            f" {self.change_message}"
        )

    def save(self, **options: Any) -> None:
        """Add the entry. Raises ``DatabaseError`` if it is there already."""
        super().save(**options | {"force_insert": True})

    def get_change_message(self) -> str:
        """Return what the operator did, as Django's own log entries do."""
        return self.change_message
