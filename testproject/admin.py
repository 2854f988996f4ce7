from __future__ import annotations

from django.contrib import admin

from testproject.models import LedgerEntry


@admin.register(LedgerEntry)
class LedgerEntryAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("kind", "user", "amount", "currency", "reference")
    list_display = ("created_at", "kind", "reference", "amount", "currency", "user")
    list_filter = ("kind",)
    search_fields = ("reference",)
    date_hierarchy = "created_at"
