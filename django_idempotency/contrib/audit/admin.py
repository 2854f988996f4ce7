from __future__ import annotations

from django.contrib import admin

from django_idempotency.contrib.audit.models import Entry
from django_idempotency.extending.admin import ReadOnly


@admin.register(Entry)
class EntryAdmin(ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows entries, the latest first."""

    list_display = ("action_time", "user", "change_message", "object_repr")
    search_fields = ("=user", "=object_id")
    ordering = ("-pk",)
