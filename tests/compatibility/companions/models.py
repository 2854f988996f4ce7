from __future__ import annotations

import pghistory
from auditlog.registry import auditlog
from django.db import models
from simple_history.models import HistoricalRecords


@auditlog.register()
@pghistory.track(pghistory.InsertEvent())
class Payment(models.Model):
    reference = models.CharField(max_length=100, primary_key=True)
    history = HistoricalRecords(user_db_constraint=False)

    def __str__(self):
        return self.reference
