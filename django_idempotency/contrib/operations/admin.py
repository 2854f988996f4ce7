from __future__ import annotations

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.extending.admin import ReadOnly


@admin.register(DeferredOperation)
class DeferredOperationAdmin(ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows deferred operations, those first that wait longest. What an operator
    decides is decided about their keys.
    """

    list_display = ("name", "scope", "created_at", "due_at", "own_record")
    list_filter = (("due_at", admin.EmptyFieldListFilter), "name")
    search_fields = ("=record_id", "=scope", "=key")
    ordering = ("due_at", "pk")
    exclude = ("headers", "arguments")
    show_full_result_count = False

    @admin.display(description=_("record"))
    def own_record(self, row: DeferredOperation) -> str:
        name = "admin:django_idempotency_idempotencyrecord_change"
        return format_html(
            '<a href="{}">{}</a>', reverse(name, args=[row.own_id]), row.own_id
        )
