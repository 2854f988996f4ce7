from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.conf import settings
from django.db import models, transaction
from django.utils.translation import gettext_lazy as _


class LedgerManager(models.Manager["LedgerEntry"]):
    def record(self, *, operation: str | None = None, **payment: Any) -> LedgerEntry:
        """Write an entry; under the same ``operation``, only the first time.

        Code that may run again after a crash names its operation. The entry is then
        there once, however often it runs.
        """
        with transaction.atomic(using=self.db, savepoint=False):
            if operation is None:
                return self.create(**payment)
            return self.get_or_create(operation=operation, defaults=payment)[0]


class LedgerEntry(models.Model):
    """One effect: money that moved."""

    class Kind(models.TextChoices):
        CHARGE = "charge", _("charge")
        TRANSFER = "transfer", _("transfer")
        PAYOUT = "payout", _("payout")
        ORDER = "order", _("order")
        REFUND = "refund", _("refund")
        DEPOSIT = "deposit", _("deposit")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(_("kind"), max_length=16, choices=Kind)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, verbose_name=_("user")
    )
    amount = models.BigIntegerField(_("amount"))
    currency = models.CharField(_("currency"), max_length=3)
    reference = models.CharField(_("reference"), max_length=255, db_index=True)
    operation = models.CharField(_("operation"), max_length=64, unique=True, null=True)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)

    objects: ClassVar[LedgerManager] = LedgerManager()

    class Meta:
        verbose_name = _("ledger entry")
        verbose_name_plural = _("ledger entries")

    def __str__(self) -> str:
        return f"{self.kind} {self.reference}: {self.amount} {self.currency}"


class Receipt(models.Model):
    """What the consumer wrote for a charge that an event reported."""

    event = models.CharField(_("event"), max_length=255)
    reference = models.CharField(_("reference"), max_length=255, db_index=True)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)

    class Meta:
        verbose_name = _("receipt")
        verbose_name_plural = _("receipts")

    def __str__(self) -> str:
        return f"{self.reference}: {self.event}"
