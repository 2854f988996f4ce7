"""The steps of operations: which are done, and their results."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_idempotency.contrib.steps.values import LONGEST_NAME


class Step(models.Model):
    """A step in one life of a record, which ``generation`` tells from others: it is the
    record's ``created_at``.

    ``finished_at``: NULL while a call that may run at most once is running, or was
    interrupted. ``token``: of the attempt that wrote this. ``result``: JSON, encrypted
    as ``headers`` say; NULL once it was erased. ``optional``: an operator let the
    operation go on without asking for it.
    """

    pk = models.CompositePrimaryKey("record_id", "generation", "name")
    record_id = models.UUIDField()
    generation = models.DateTimeField()
    name = models.CharField(max_length=LONGEST_NAME)
    token = models.UUIDField()
    attempt = models.IntegerField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    headers = models.JSONField(default=list)
    result = models.BinaryField(null=True)
    optional = models.BooleanField(db_default=False)

    objects: ClassVar[models.Manager[Step]] = models.Manager()

    class Meta:
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        db_table = "django_idempotency_step"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
