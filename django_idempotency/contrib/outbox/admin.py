"""The admin of the outbox: dead letters come first, with an action to have them tried
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_idempotency.contrib.outbox import maintenance
from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.maintenance import Act, decide, version
from django_idempotency.contrib.outbox.models import TRIED, OutboxEvent, Status
from django_idempotency.contrib.outbox.publishing import database, opened
from django_idempotency.extending import column, printable, register
from django_idempotency.extending.admin import (
    RESPONSE_BODY,
    Alarm,
    Decision,
    ReadOnly,
    panel,
    readable,
)
from django_idempotency.extending.figures import amount
from django_idempotency.extending.operators import write_entry
from django_idempotency.extending.stores import DatabaseNow
from django_idempotency.maintenance import Refusal

TEMPLATES = "admin/django_idempotency/idempotencyrecord"
ALIVE = _("It is not a dead letter.")
MOST = 10_000  # the most dead letters that are counted
TIMES = ("shown_available_at", "shown_given_up_at", "shown_created_at")


def dead_letter_alarms(using: str) -> list[Alarm]:
    """Return the alarm that there are dead letters, if the outbox is in the database
    ``using``.
    """
    if using != database():
        return []
    count = (
        OutboxEvent.objects.using(using)
        .filter(TRIED, status=Status.DEAD)[:MOST]
        .count()
    )
    return (
        [Alarm(_("%(count)s dead letters") % {"count": amount(count, MOST)})]
        if count
        else []
    )


register("django_idempotency_outbox", alarms=[dead_letter_alarms])


class Requeue(Decision):
    act = Act.REQUEUE
    title = button = _("Requeue dead letters")
    asks = _("These events are sent again, before the later ones of their keys.")


class Discard(Decision):
    act = Act.DISCARD
    title = button = _("Discard dead letters for good")
    asks = _(
        "These events are deleted and never sent; the later ones of their keys go on."
    )


def _deciding(decision: type[Decision]) -> Any:
    """Return the admin action that asks for confirmation, and decides once that was
    given.
    """
    act = decision.act

    @admin.action(description=decision.title, permissions=[str(act)])
    def action(
        model_admin: Any, request: HttpRequest, queryset: QuerySet[OutboxEvent]
    ) -> HttpResponse | None:
        form = decision(request.POST if "confirmed" in request.POST else None)
        if form.is_valid():
            seen = dict(
                each.partition(" ")[::2] for each in request.POST.getlist("record")
            )
            letters = maintenance.dead_letters().filter(
                pk__in=queryset.values_list("pk", flat=True)
            )
            _tell(
                request,
                form,
                *decide(
                    act,
                    letters,
                    by=request.user,
                    note=form.cleaned_data["note"],
                    seen=seen,
                ),
            )
            return None
        return _confirmation(model_admin, request, form, queryset)

    action.__name__ = str(act)
    return action


def _confirmation(
    model_admin: Any,
    request: HttpRequest,
    form: Decision,
    queryset: QuerySet[OutboxEvent],
) -> HttpResponse:
    # Only the events that were ticked, never all pages: operators are responsible for
    # what they have seen.
    ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
    events = list(queryset.filter(pk__in=ticked).defer("payload"))
    is_dead = {event.pk: event.status == Status.DEAD for event in events}
    context = {
        **model_admin.admin_site.each_context(request),
        "title": form.title,
        "opts": model_admin.opts,
        "rows": [
            (
                event,
                version(event),
                event.error,
                None if is_dead[event.pk] else ALIVE,
            )
            for event in events
        ],
        "possible": any(is_dead.values()),
        "form": form,
        "media": model_admin.media,
        "filters": request.GET.urlencode(),
        "list": request.get_full_path(),
    }
    return TemplateResponse(
        request, "admin/django_idempotency_outbox/outboxevent/confirm.html", context
    )


def _tell(
    request: HttpRequest, form: Decision, done: int, refused: Mapping[Refusal, int]
) -> None:
    if done:
        text = ngettext(
            "%(title)s: done for one event.",
            "%(title)s: done for %(count)d events.",
            done,
        )
        messages.success(request, text % {"title": form.title, "count": done})
    for why, count in refused.items():
        text = ngettext(
            "%(title)s: not done for one event.",
            "%(title)s: not done for %(count)d events.",
            count,
        )
        messages.warning(
            request, f"{text % {'title': form.title, 'count': count}} {why.label}"
        )


class SituationFilter(admin.SimpleListFilter):
    """The list that is shown: the first ``MOST`` by an index. One is always chosen,
    since no index serves them together; a search looks at all events.
    """

    title = _("situation")
    parameter_name = "situation"
    SITUATIONS: ClassVar[dict[str, tuple[Any, Q]]] = {
        "dead": (_("Dead letters"), TRIED & Q(status=Status.DEAD)),
        "failing": (_("Refused at least once"), TRIED & Q(status=Status.PENDING)),
        "waiting": (_("Waiting"), Q(status=Status.PENDING, attempts=0)),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, title) for name, (title, _events) in self.SITUATIONS.items()]

    def choices(self, changelist: Any) -> Iterator[Any]:
        chosen = None if changelist.query else self.value() or "dead"
        for name, title in self.lookup_choices:
            query = changelist.get_query_string({self.parameter_name: name}, ["q", "p"])
            yield {"selected": name == chosen, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if request.GET.get("q", "").strip():
            return queryset
        _title, wanted = self.SITUATIONS.get(
            self.value() or "dead", self.SITUATIONS["dead"]
        )
        events = queryset.filter(wanted)
        ids = events.order_by("id").values_list("id", flat=True)
        last = ids[MOST - 1 : MOST].first()
        return events if last is None else events.filter(id__lte=last)


class PublisherFilter(admin.SimpleListFilter):
    """Of the publishers in the settings: to find those of all events would read them
    all.
    """

    title = _("publisher")
    parameter_name = "publisher"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in options().publishers]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        chosen = self.value()
        return queryset.filter(publisher=chosen) if chosen else queryset


class EventList(ChangeList):
    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.full_result_count = self.result_count  # there is no "Show all"


@admin.register(OutboxEvent)
class OutboxEventAdmin(ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
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
    list_filter = (SituationFilter, PublisherFilter)
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they would count all events
    search_fields = ("event_id",)
    search_help_text = _("An event id, as consumers know it, or a whole key.")
    actions = [_deciding(decision) for decision in (Requeue, Discard)]
    change_list_template = (
        "admin/django_idempotency_outbox/outboxevent/change_list.html"
    )
    fieldsets = (
        (None, {"fields": ("event_id", "topic", "key", "status", "error")}),
        (_("Publishing"), {"fields": ("publisher", "lane", "attempts", *TIMES)}),
        (_("Content"), {"fields": ("content_type", "content")}),
    )

    class Media:
        css = {"all": ("django_idempotency/admin.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxEvent]:
        events: QuerySet[OutboxEvent] = super().get_queryset(request).using(database())
        return events.annotate(now=DatabaseNow()).order_by("id")

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("id",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return EventList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # Otherwise, users who may not see these columns could find out their values bit
        # by bit.
        return not lookup.startswith(("payload", "headers")) and super().lookup_allowed(
            lookup, value, request
        )

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        raised = panel(lambda ask: ask(dead_letter_alarms), database())
        return super().changelist_view(
            request, {"alarms": raised, **(extra_context or {})}
        )

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
        return request.user.has_perm(Act.REQUEUE.permission)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(Act.DISCARD.permission)

    def get_fieldsets(
        self, request: HttpRequest, obj: OutboxEvent | None = None
    ) -> Any:
        """Leave out the content unless the user may see responses, which are no more
        confidential.
        """
        return (
            self.fieldsets
            if request.user.has_perm(RESPONSE_BODY)
            else self.fieldsets[:-1]
        )

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Write a history entry before content is shown, so that nobody sees any
        without an entry.
        """
        event = context.get("original")
        if event is not None and request.user.has_perm(RESPONSE_BODY):
            write_entry(event, request.user, "Payload viewed.")
        return super().render_change_form(request, context, *args, **options)

    shown_created_at = column("created_at", _("created at"))
    shown_available_at = column("available_at", _("next attempt at"))
    shown_given_up_at = column("given_up_at", _("given up at"))

    @admin.display(description=_("payload"))
    def content(self, event: OutboxEvent) -> SafeString:
        content = opened(event.event_id, bytes(event.payload), event.headers)
        headers = (
            [(printable(name), printable(value)) for name, value in content[1].items()]
            if content
            else []
        )
        shown = readable(content[0], event.content_type) if content else None
        context = {
            "shown": shown,
            "headers": render_to_string(
                f"{TEMPLATES}/headers.html", {"headers": headers}
            ),
        }
        return render_to_string(f"{TEMPLATES}/body.html", context)
