from __future__ import annotations

from typing import ClassVar

from django.db import models


class Effect(models.Model):
    """What a request leaves behind, under the key it came with. Two effects of one key
    are one too many.
    """

    key = models.CharField(max_length=64)
    amount = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    class Meta:
        db_table = "effect"

    def __str__(self) -> str:
        return self.key
