"""The admin of the outbox: dead letters come first, with an action to have them tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin, messages
from django.db.models import Case, QuerySet, Value, When
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_idempotency.moments import column
from django_idempotency.outbox import maintenance
from django_idempotency.outbox.models import OutboxEvent, Relay, Status

SHOWN_BYTES = 10_000
TIMES = ("shown_available_at", "shown_finished_at", "shown_created_at")

if TYPE_CHECKING:
    EventModelAdmin = admin.ModelAdmin[OutboxEvent]
    RelayModelAdmin = admin.ModelAdmin[Relay]
else:
    EventModelAdmin = RelayModelAdmin = admin.ModelAdmin


class _ReadOnly:
    """Nothing can be added, changed or deleted with a form."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(OutboxEvent)
class OutboxEventAdmin(_ReadOnly, EventModelAdmin):
    list_display = (
        "topic",
        "key",
        "status",
        "attempts",
        "error",
        "publisher",
        "shown_created_at",
        "shown_available_at",
    )
    list_filter = ("status", "publisher")
    list_per_page = 50
    show_full_result_count = False
    search_fields = ("event_id",)
    search_help_text = _("An event id, as consumers know it, or a whole key.")
    actions = ["requeue", "discard"]
    fieldsets = (
        (None, {"fields": ("event_id", "topic", "key", "status", "error")}),
        (_("Publishing"), {"fields": ("publisher", "lane", "attempts", *TIMES)}),
        (_("Content"), {"fields": ("content_type", "headers", "content", "record_id")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxEvent]:
        """Order dead letters first, then failing events, each by age."""
        rank = Case(
            When(status=Status.DEAD, then=Value(0)),
            When(status=Status.PENDING, attempts__gt=0, then=Value(1)),
            When(status=Status.PENDING, then=Value(2)),
            default=Value(3),
        )
        return super().get_queryset(request).using(maintenance.database()).order_by(rank, "id")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[OutboxEvent], search_term: str
    ) -> tuple[QuerySet[OutboxEvent], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(event_id=UUID(term)), False
        except ValueError:
            return queryset.filter(key=term), False

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_idempotency_outbox.change_outboxevent")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_idempotency_outbox.delete_outboxevent")

    @admin.action(description=_("Requeue dead letters"), permissions=["requeue"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[OutboxEvent]) -> None:
        chosen = self._note_and_choose(request, queryset, "Requeued.")
        count = maintenance.requeue(chosen)
        text = ngettext("%(count)d dead letter requeued.", "%(count)d dead letters requeued.", count)
        self.message_user(request, text % {"count": count}, messages.SUCCESS if count else messages.WARNING)

    @admin.action(description=_("Discard dead letters for good"), permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[OutboxEvent]) -> None:
        chosen = self._note_and_choose(request, queryset, "Discarded.")
        count = maintenance.discard(chosen)
        text = ngettext("%(count)d dead letter discarded.", "%(count)d dead letters discarded.", count)
        self.message_user(request, text % {"count": count}, messages.SUCCESS if count else messages.WARNING)

    def _note_and_choose(self, request: HttpRequest, queryset: QuerySet[OutboxEvent], note: str) -> list[UUID]:
        dead = [event for event in queryset if event.status == Status.DEAD]
        for event in dead:
            self.log_change(request, event, note)
        return [event.event_id for event in dead]

    shown_created_at = column("created_at", _("created at"))
    shown_available_at = column("available_at", _("next attempt at"))
    shown_finished_at = column("finished_at", _("published or given up at"))

    @admin.display(description=_("payload"))
    def content(self, event: OutboxEvent) -> SafeString:
        text = bytes(event.payload)[:SHOWN_BYTES].decode(errors="backslashreplace")
        return format_html("<pre>{}</pre>", text)


@admin.register(Relay)
class RelayAdmin(_ReadOnly, RelayModelAdmin):
    list_display = ("publisher", "host", "pid", "shown_started_at", "shown_lease_until")
    fields = ("publisher", "host", "pid", "shown_started_at", "shown_lease_until")
    shown_started_at = column("started_at", _("started at"))
    shown_lease_until = column("lease_until", _("lease until"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Relay]:
        return super().get_queryset(request).using(maintenance.database())
