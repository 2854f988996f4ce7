from __future__ import annotations

import uuid

from django.contrib.auth.models import AbstractBaseUser
from django.db import models


class Customer(AbstractBaseUser):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    name = models.CharField(max_length=64, unique=True)
    USERNAME_FIELD = "name"


class Booking(models.Model):
    """An effect, in the database ``ledger``."""

    reference = models.CharField(max_length=64)

    def __str__(self):
        return self.reference


class LedgerRouter:
    def db_for_read(self, model, **hints):
        return "ledger" if model is Booking else None

    db_for_write = db_for_read
