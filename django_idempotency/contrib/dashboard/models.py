"""What is counted for the dashboard. Neither table holds keys, scopes or bodies."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models, transaction

from django_idempotency.extending.stores import ahead, record_database

PRUNED_AT_ONCE = 10_000


class IdempotencyCounter(models.Model):
    """How often one event happened at one view within five minutes. It contains neither
    keys nor scopes.
    """

    pk = models.CompositePrimaryKey("since", "view", "event")
    since = models.DateTimeField()
    view = models.CharField(max_length=200)
    event = models.CharField(max_length=32)
    count = models.BigIntegerField()

    objects: ClassVar[models.Manager[IdempotencyCounter]] = models.Manager()

    class Meta:
        db_table = "django_idempotency_counter"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.view} {self.event}: {self.count}"


class IdempotencyObservation(models.Model):
    """A digest of an observed request, and the time of the last request like it. It
    doesn't say who sent it.
    """

    digest = models.UUIDField(primary_key=True, editable=False)
    seen_at = models.DateTimeField()
    found = models.IntegerField()  # how many duplicates the last write found

    objects: ClassVar[models.Manager[IdempotencyObservation]] = models.Manager()

    class Meta:
        db_table = "django_idempotency_observation"
        default_permissions = ()
        indexes = [
            models.Index(fields=["seen_at"], name="idempotency_observation_seen")
        ]

    def __str__(self) -> str:
        return str(self.digest)


def prune(model: Any, column: str, older_than: float, using: str | None) -> int:
    """Delete about ``PRUNED_AT_ONCE`` of the oldest rows past ``older_than`` seconds;
    return how many were deleted.
    """
    using = record_database(using)
    past = model.objects.using(using).filter(**{f"{column}__lt": ahead(-older_than)})
    with transaction.atomic(using=using):
        some = list(
            past.order_by(column).values_list(column, flat=True)[:PRUNED_AT_ONCE]
        )
        deleted: int = (
            past.filter(**{f"{column}__lte": some[-1]})._raw_delete(using)
            if some
            else 0
        )
        return deleted
