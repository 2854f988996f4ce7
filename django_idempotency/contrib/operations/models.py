"""Operations that requests have deferred."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_idempotency.extending.stores import Operation


class DeferredOperation(models.Model):
    """An operation that the response to a request has deferred.

    ``record_id``: of the request's record, which keeps that response. ``scope`` and
    ``key``: of the record of the operation itself. Both have one scope, so that they
    are erased and exported together. ``due_at``: when a worker may look at it; NULL
    once it has ended. ``arguments``: JSON, encrypted as ``headers`` say; NULL then.
    ``retention``: how long its result is kept, in seconds. ``attempts_before``: made
    before an operator allowed a retry.
    """

    record_id = models.UUIDField(primary_key=True)
    scope = models.TextField()
    key = models.CharField(max_length=100)
    name = models.CharField(max_length=100)
    headers = models.JSONField(default=list)
    arguments = models.BinaryField(null=True)
    retention = models.FloatField()
    created_at = models.DateTimeField()
    due_at = models.DateTimeField(null=True)
    attempts_before = models.IntegerField(default=0)

    objects: ClassVar[models.Manager[DeferredOperation]] = models.Manager()

    class Meta:
        verbose_name = _("deferred operation")
        verbose_name_plural = _("deferred operations")
        db_table = "django_idempotency_deferred_operation"
        default_permissions = ("view",)
        indexes = (
            models.Index(
                fields=["due_at"],
                name="idempotency_deferred_due",
                condition=models.Q(due_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, record: Any) -> DeferredOperation | None:
        """Return what the request of ``record`` has deferred."""
        rows = cls.objects.using(record._state.db).filter(pk=record.pk)
        return rows.defer("arguments").first()

    @property
    def own_id(self) -> UUID:
        """The id of the record of the operation itself."""
        return Operation(self.scope, self.key, b"").id
