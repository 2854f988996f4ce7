"""The admin: what is stuck and since when, and what a client was told. Plain for now, and read-only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.http import HttpRequest
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from django_idempotency.dashboard import dashboard
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, Status

RESPONSE_BODY = "django_idempotency.view_response_body"
SHOWN_BYTES = 10_000


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[IdempotencyRecord]
else:
    ModelAdmin = admin.ModelAdmin


class SituationFilter(admin.SimpleListFilter):
    title = _("situation")
    parameter_name = "situation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("stuck", _("Lease ran out")),
            ("held", _("Held for a decision")),
            ("retryable", _("Failed, free to retry")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> QuerySet[IdempotencyRecord]:
        match self.value():
            case "stuck":
                return queryset.filter(status__in=LIVE, locked_until__lt=DatabaseNow())
            case "held":
                return queryset.filter(held=True)
            case "retryable":
                return queryset.filter(status=Status.FAILED, held=False, response_status__isnull=True)
        return queryset


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ModelAdmin):
    list_display = ("key", "scope", "status", "processing_for", "method", "path", "attempts", "replays", "created_at")
    list_filter = ("status", SituationFilter, "mode", "method")
    search_fields = ("key",)
    search_help_text = _("A whole key, as the client sent it.")
    ordering = ("-created_at",)
    fieldsets = (
        (None, {"fields": ("key", "scope", "status", "held", "reason", "processing_for")}),
        (_("Request"), {"fields": ("method", "path", "fingerprint_hex")}),
        (_("Claim"), {"fields": ("mode", "hold_on_crash", "attempts", "token", "locked_at", "locked_until")}),
        (_("Answer"), {"fields": ("response_status", "response_headers", "body")}),
        (
            _("Times"),
            {"fields": ("created_at", "updated_at", "expires_at", "purge_at", "replays", "last_replayed_at")},
        ),
    )

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(partial(dashboard, self))
        return [path("dashboard/", view, name="django_idempotency_dashboard"), *super().get_urls()]

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyRecord]:
        age = ExpressionWrapper(DatabaseNow() - F("locked_at"), output_field=DurationField())
        return super().get_queryset(request).annotate(age=age).defer("response_body")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord], search_term: str
    ) -> tuple[QuerySet[IdempotencyRecord], bool]:
        """Search by the range of the primary key that a raw key maps to, not through the table."""
        if not search_term:
            return queryset, False
        return queryset & IdempotencyRecord.objects.with_key(search_term.strip().strip('"')), False

    @admin.display(description=_("processing for"), ordering="locked_at")
    def processing_for(self, record: Any) -> str | None:
        return None if record.age is None else str(record.age).partition(".")[0]

    @admin.display(description=_("fingerprint"))
    def fingerprint_hex(self, record: IdempotencyRecord) -> str:
        return bytes(record.fingerprint).hex()

    @admin.display(description=_("response body"))
    def body(self, record: IdempotencyRecord) -> SafeString | None:
        if record.answer is None or record.answer.body is None:
            return None
        shown = record.answer.body[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
        return format_html("<pre>{}</pre>", shown)

    def get_fieldsets(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> Any:
        if request.user.has_perm(RESPONSE_BODY):
            return self.fieldsets
        return [
            (title, {"fields": tuple(name for name in options["fields"] if name != "body")})
            for title, options in self.fieldsets
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
