"""The admin of idempotency records, and the dashboard."""

from __future__ import annotations

from django.contrib import admin

from django_idempotency.admin.records import IdempotencyRecordAdmin

__all__ = ["IdempotencyRecordAdmin"]

# Show the strip of alarms on the index of the default admin site, unless the project has an index of its own.
if admin.site.index_template is None:
    admin.site.index_template = "admin/django_idempotency/index.html"
